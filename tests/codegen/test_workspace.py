from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile

from autoplan.codegen.workspace import workspace_bytes

SHAPES = [
    # batch, heads, kv heads, rows, channels, value channels, mask
    (2, 4, 4, 64, 16, 16, None),
    (2, 4, 4, 512, 16, 16, None),
    (1, 2, 2, 1024, 64, 64, None),
    (2, 8, 2, 256, 32, 32, None),
    (2, 4, 4, 256, 16, 16, "bool"),
    (2, 4, 4, 256, 16, 16, "float"),
]


def allocated(op: torch._ops.OpOverload, *args: object) -> int:
    """Peak of the allocator while an op runs, without its results."""
    op(*args)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        results = op(*args)
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        total += e.nbytes()
        peak = max(peak, total)
    return peak - sum(r.nbytes for r in results)


def node(op: torch._ops.OpOverload, *args: object) -> fx.Node:
    graph = fx.Graph()

    def placeholder(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        new = graph.placeholder("x")
        new.meta["val"] = x
        return new

    return graph.call_function(op, tuple(placeholder(a) for a in args))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("ignore")  # the profiler warns about itself on machines without a GPU
def test_attention_workspace_is_what_the_allocator_sees(shape: tuple[int, ...]) -> None:
    batch, heads, kv, rows, channels, values, kind = shape
    torch.manual_seed(0)
    widths = ((heads, channels), (kv, channels), (kv, values))
    q, k, v = (torch.randn(batch, rows, h, c).transpose(1, 2) for h, c in widths)
    mask = None
    if kind is not None:
        mask = torch.rand(batch, 1, rows, rows) > 0.3 if kind == "bool" else torch.randn(batch, 1, rows, rows)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        forward, backward = torch.ops.autoplan.attention.default, torch.ops.autoplan.attention_backward.default
        args = (q, k, v, mask, mask is None, 0.25)
        assert workspace_bytes(node(forward, *args)) == allocated(forward, *args)
        out, logsumexp = forward(*args)
        args = (torch.randn_like(out), q, k, v, mask, out, logsumexp, mask is None, 0.25)
        assert workspace_bytes(node(backward, *args)) == allocated(backward, *args)
    finally:
        torch.set_num_threads(threads)
