"""Calibration: all is measured, the file loads, nothing hangs. Figures are of this machine, so none is tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from autoplan.errors import OptionError
from autoplan.hardware import ClusterSpec, load_cluster
from autoplan.ir import OpGraph
from autoplan.ir.files import write_whole
from autoplan.profiler import cost_table
from autoplan.profiler.calibrate import calibrate
from autoplan.profiler.calibrate import links as links_module
from autoplan.profiler.calibrate.links import KINDS, measure
from autoplan.profiler.calibrate.machine import Machine, Sample
from autoplan.profiler.calibrate.write import PHASES
from autoplan.profiler.calibrate.write import measure as measure_all
from autoplan.trace import trace

HASTY = Machine(torch.device("cpu"), True, 2, 1e-4)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A file of one hasty calibration, and what it said on the way."""
    path, said = tmp_path_factory.mktemp("calibrate") / "here.toml", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links_module, "measure", lambda size, backend, quick: {kind: POINTS for kind in KINDS})
        write_whole(path, measure_all(HASTY, "here", 2, 1, True, said.append), "the profile file")
    return path, said


POINTS = [(1024.0, Sample(1e-4, 0.1)), (4096.0, Sample(2e-4, 0.2))]


def test_file_loads_with_every_key_and_source(written: tuple[Path, list[str]]) -> None:
    spec = load_cluster(written[0])
    device, level = spec.device, spec.levels[0]
    assert ClusterSpec.from_json(spec.to_json()) == spec
    assert device.view_s > 0 and device.allocation_s is not None and device.update_s is not None
    ops = dict(device.op_flops_per_s)
    assert {"batch_norm", "lstm", "gru", "embedding_bag", "index", "conv2d.pointwise", "conv2d.grouped"} <= set(ops)
    kinds = {"", ".dropout", ".mask", ".bias"}
    assert {"scaled_dot_product_attention" + kind for kind in kinds} <= set(ops)
    assert {m.kind for m in level.measured} == set(KINDS)
    sources = dict(level.sources)
    assert all("spread up to 20%" in sources[kind] for kind in KINDS)
    assert all("spread up to" in dict(device.sources)[key] for key in ("flops_per_s", "op_flops_per_s", "update_s"))


def test_progress_counts_the_phases(written: tuple[Path, list[str]]) -> None:
    found = [re.search(r"\((\d+) of (\d+)\)$", line) for line in written[1]]
    assert [(m[1], m[2]) for m in found if m] == [(str(i), str(PHASES)) for i in range(1, PHASES + 1)]


def test_predictions_use_the_file(written: tuple[Path, list[str]]) -> None:
    table = cost_table(_normed(), load_cluster(written[0]))
    assert {n.op for n in table.nodes} == {"conv2d", "batch_norm"}
    assert all(n.forward_s > 0 and n.backward_s > 0 for n in table.nodes)


def _normed() -> OpGraph:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, track_running_stats=False)).train()
    return trace(model, (torch.zeros(2, 3, 8, 8),)).graph


def test_collectives_between_two_processes() -> None:
    found = measure(2, "gloo", True)
    assert set(found) == set(KINDS)
    for points in found.values():
        assert [b for b, _ in points] == [2.0**10, 2.0**14, 2.0**18, 2.0**22]
        assert all(s.seconds > 0 and s.spread >= 0 for _, s in points)


def test_collectives_end_at_their_limit() -> None:
    with pytest.raises(OptionError, match="among 2 processes: no result after 0 s.*; try fewer --ranks"):
        measure(2, "gloo", True, limit_s=0.2)


def test_a_process_that_fails_is_quoted() -> None:
    with pytest.raises(OptionError, match="among 2 processes: a process failed .*nosuch"):
        measure(2, "nosuch", True)


@pytest.mark.parametrize(("ranks", "threads"), [(1, 1), (2, 0)])
def test_too_few(ranks: int, threads: int) -> None:
    with pytest.raises(OptionError, match="at least 2 ranks and 1 thread"):
        calibrate(ranks=ranks, threads=threads)


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    write_whole(path, "first", "the file")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half \ud800", "the file")
    assert path.read_text() == "first"
    with pytest.raises(OptionError, match="cannot write the file to"):
        write_whole(tmp_path / "missing" / "my.toml", "text", "the file")
    assert list(tmp_path.iterdir()) == [path]
