"""The command line, with `autoplan.api` replaced where planning is not what is tested."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoplan import cli
from autoplan.errors import InfeasibleError, OptionError
from autoplan.hardware import known_clusters
from autoplan.ir import Mesh, Plan
from autoplan.ir.plan import OPTIMIZERS, PRECISIONS
from tests.display.plans import make_plan
from tests.display.test_tables import make_demo, make_profile

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line: exit code, stdout, stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(args)
        out = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out.out, out.err

    return call


class FakeApi(types.ModuleType):
    """Stands in for `autoplan.api`; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("autoplan.api")
        self.asked: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.failures: tuple[str, ...] = ()

    def load_model(self, spec: str, *, batch: int | None = None, seq: int | None = None) -> tuple[Any, Any]:
        self.asked["load"] = (spec, batch, seq)
        return "model", "inputs"

    def plan(self, model: Any, inputs: Any, **options: Any) -> Plan:
        if self.error:
            raise self.error
        options.pop("progress")("solving")
        self.asked["plan"] = (model, inputs, options)
        return make_plan()

    def profile(self, model: Any, inputs: Any, **options: Any) -> Any:
        options.pop("progress")("tracing")
        self.asked["profile"] = options
        return make_profile()

    def emit_code(self, plan: Plan, model: str | None = None) -> str:
        self.asked["code"] = (plan, model)
        return "def forward(x):\n    return x\n"

    def run_demo(self, *, steps: int, progress: Callable[[str], None]) -> Any:
        progress("planning")
        self.asked["demo"] = steps
        return make_demo(failures=self.failures)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    import autoplan

    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "autoplan.api", fake)
    monkeypatch.setattr(autoplan, "api", fake, raising=False)
    return fake


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    make_plan().save(path)
    return path


def test_constants_are_those_of_the_plan() -> None:
    assert cli.PRECISIONS == PRECISIONS
    assert tuple(OPTIMIZERS) == cli.OPTIMIZERS


def test_version(run: Run) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert run("--version") == (0, f"autoplan {project['version']}\n", "")


@pytest.mark.parametrize("command", sorted(cli.autoplan_command.commands))
def test_every_command_has_an_example(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"  autoplan {command}" in out


def test_plan_passes_the_options_on_and_prints_tables(run: Run, api: FakeApi, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = run(
        "plan", "config.json", "--batch", "8", "--seq", "128", "--cluster", "a100-8x", "--nodes", "2", "--memory",
        "40GB", "--mesh", "2x8", "--pin", "*.c_fc.weight=R,S(1)", "--pin", "a=S(0)@d0", "--precision", "bf16",
        "--optimizer", "sgd", "--no-remat", "-o", str(path),
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert api.asked["load"] == ("config.json", 8, 128)
    model, inputs, options = api.asked["plan"]
    assert (model, inputs) == ("model", "inputs")
    assert options == {
        "cluster": "a100-8x", "nodes": 2, "devices": None, "memory": 40 * 10**9, "mesh": Mesh((2, 8)),
        "pins": {"*.c_fc.weight": "R,S(1)", "a": "S(0)@d0"}, "precision": "bf16", "optimizer": "sgd", "remat": False,
        "source": {"model": "config.json", "batch": 8, "seq": 128},
    }  # fmt: skip
    assert "Plan for GPT2LMHeadModel" in out
    assert f"written to {path}" in out
    assert Plan.load(path) == make_plan()


def test_plan_json_is_all_that_is_printed(run: Run, api: FakeApi) -> None:
    code, out, err = run("plan", "x:y", "--json")
    assert (code, err) == (0, "")
    assert Plan.from_json(json.loads(out)) == make_plan()
    assert api.asked["plan"][2]["source"] == {"model": "x:y"}
    assert api.asked["plan"][2]["pins"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cluster", "nope"], "unknown cluster 'nope'"),
        (["--memory", "4XB"], "is not of the form 40GB"),
        (["--memory", "0"], "less than one byte"),
        (["--nodes", "0"], "0 is not in the range"),
        (["--nodes", "2", "--devices", "4"], "give nodes or devices, not both"),
        (["--cluster", "a100-8x", "--devices", "12"], "12 devices do not fill its nodes"),
        (["--mesh", "2y4"], "mesh '2y4' is not of the form"),
        (["--pin", "c_fc"], "is not of the form GLOB=PLACEMENT"),
        (["--pin", "a=R", "--pin", "a=P"], "pinned twice"),
        (["--precision", "fp8"], "'fp8' is not one of"),
        (["--optimizer", "lion"], "'lion' is not one of"),
        (["-o", "no/such/folder/plan.json"], "no folder that can be written to"),
        (["--what"], "No such option"),
    ],
)
def test_bad_options_end_before_any_model_is_loaded(run: Run, api: FakeApi, args: list[str], message: str) -> None:
    code, out, err = run("plan", "x:y", *args)
    assert code == 2
    assert out == ""
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert api.asked == {}


def test_what_nothing_can_meet_exits_with_three_and_writes_nothing(run: Run, api: FakeApi, tmp_path: Path) -> None:
    api.error = InfeasibleError("no plan fits 1 GB; 2 GB works", minimum_bytes=2 * 10**9)
    path = tmp_path / "plan.json"
    assert run("plan", "x:y", "-o", str(path)) == (3, "", "error: no plan fits 1 GB; 2 GB works\n")
    assert list(tmp_path.iterdir()) == []


def test_unexpected_errors_name_the_bug_and_debug_shows_it(run: Run, api: FakeApi) -> None:
    api.error = ZeroDivisionError("division\nby zero")
    code, _, err = run("plan", "x:y")
    assert code == 1
    assert err.count("\n") == 1
    assert "bug in autoplan: ZeroDivisionError: division by zero (test_cli.py:" in err
    assert "--debug" in err
    code, _, err = run("--debug", "plan", "x:y")
    assert code == 1
    assert "Traceback" in err


def test_debug_shows_the_traceback_of_deliberate_errors_too(run: Run, api: FakeApi) -> None:
    api.error = OptionError("no")
    code, _, err = run("--debug", "plan", "x:y")
    assert code == 2
    assert "Traceback" in err
    assert err.endswith("error: no\n")


def test_an_interrupt_exits_with_130(run: Run, api: FakeApi) -> None:
    api.error = KeyboardInterrupt()
    code, _, err = run("plan", "x:y")
    assert code == 130
    assert "interrupted" in err


def test_show_prints_tables_or_json(run: Run, plan_file: Path) -> None:
    code, out, err = run("show", str(plan_file))
    assert (code, err) == (0, "")
    assert "Plan for GPT2LMHeadModel" in out
    assert "transformer.h.*.mlp.c_fc addmm" in out
    code, out, err = run("show", str(plan_file), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(plan_file.read_text())


def test_show_code_is_plain_where_it_is_piped(run: Run, plan_file: Path, api: FakeApi) -> None:
    assert run("show", str(plan_file), "--code") == (0, "def forward(x):\n    return x\n", "")
    assert api.asked["code"] == (make_plan(), None)
    run("show", str(plan_file), "--code", "--model", "a:b")
    assert api.asked["code"][1] == "a:b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the plan"),
        ("{", "not a plan file"),
        ("{}", "is no plan file"),
        ('{"format": 99, "graph_fingerprint": ""}', "plan format 99"),
        ("[]", "is no plan file"),
    ],
)
def test_show_refuses_what_is_no_plan(run: Run, tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    code, out, err = run("show", str(path))
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("args", [("--code", "--json"), ("--model", "a:b")])
def test_show_refuses_options_that_contradict(run: Run, plan_file: Path, args: tuple[str, ...]) -> None:
    assert run("show", str(plan_file), *args)[0] == 2


def test_show_does_not_import_torch(plan_file: Path) -> None:
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "solver")!r}]
from autoplan.cli import main
try:
    main(["show", {str(plan_file)!r}])
except SystemExit as end:
    assert end.code == 0
print([m for m in ("torch", "numpy", "transformers") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_profile_prints_tables_or_json(run: Run, api: FakeApi) -> None:
    code, out, err = run("profile", "x:y", "--cluster", "h100-8x", "--precision", "bf16")
    assert (code, err) == (0, "")
    assert "Profile of Tiny<b>" in out
    expected = {"cluster": "h100-8x", "precision": "bf16", "optimizer": "adamw", "causal_flops": "full"}
    assert api.asked["profile"] == expected
    code, out, err = run("profile", "x:y", "--json")
    assert json.loads(out) == json.loads(json.dumps(make_profile().to_json()))
    assert run("profile", "x:y", "--cluster", "nope")[0] == 2


def test_profile_writes_a_table_and_a_trace(run: Run, api: FakeApi, tmp_path: Path) -> None:
    table, events = tmp_path / "ops.csv", tmp_path / "step.json"
    assert run("profile", "x:y", "--csv", str(table), "--chrome-trace", str(events), "--causal-flops", "half")[0] == 0
    assert api.asked["profile"]["causal_flops"] == "half"
    assert table.read_text().startswith("key,op,module,forward_flops")
    assert json.loads(events.read_text())["traceEvents"]
    assert sorted(tmp_path.iterdir()) == [table, events]
    code, _, err = run("profile", "x:y", "--csv", str(tmp_path / "missing" / "ops.csv"))
    assert code == 2 and "cannot write" in err and "Traceback" not in err


def test_clusters(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("clusters")
    assert code == 0
    assert all(name in out for name in known_clusters())
    code, out, _ = run("clusters", "a100-8x")
    assert code == 0
    assert "NVIDIA A100 datasheet" in out
    code, _, err = run("clusters", "a100")
    assert code == 2
    assert "a100-8x" in err


def test_calibrate(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import autoplan.profiler.calibrate as room

    text = (ROOT / "profiles" / "cpu-gloo.toml").read_text()
    asked: dict[str, Any] = {}

    def measured(**options: Any) -> str:
        options.pop("progress")("memory (1 of 7)")
        asked.update(options)
        return text

    monkeypatch.setattr(room, "calibrate", measured)
    path = tmp_path / "my.toml"
    code, out, _ = run("calibrate", "-o", str(path), "--ranks", "4", "--threads", "2", "--quick")
    assert code == 0 and "written to" in out
    assert asked == {"name": "my", "ranks": 4, "threads": 2, "quick": True}
    assert path.read_text() == text
    asked.clear()
    for bad in (tmp_path / "missing" / "my.toml", tmp_path / "my.json", tmp_path):
        code, _, err = run("calibrate", "-o", str(bad))
        assert code == 2 and "Traceback" not in err and not asked
    monkeypatch.setattr("os.replace", _refuse)
    code, _, err = run("calibrate", "-o", str(path))
    assert code == 2 and "cannot write the profile file to" in err and "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["my.toml"]


def _refuse(*paths: object) -> None:
    raise OSError(28, "No space left on device")


def test_demo_exits_with_one_where_something_disagrees(run: Run, api: FakeApi) -> None:
    code, out, err = run("demo")
    assert (code, err) == (0, "")
    assert "Losses agree to 1.0e-07" in out
    assert api.asked["demo"] == 20
    api.failures = ("losses differ by 1e-3",)
    code, out, _ = run("demo", "--steps", "3")
    assert code == 1
    assert out.rstrip().endswith("losses differ by 1e-3")
    assert run("demo", "--steps", "1")[0] == 2


def test_a_closed_pipe_is_no_error(plan_file: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from autoplan.cli import main; main(['show', {str(plan_file)!r}])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert err == ""
