"""A profile as Chrome trace events (the "Trace Event Format" of Chromium), one step on a time line.

Forward, backward and the optimizer's update are three tracks of complete events (``"ph": "X"``); memory is a counter
(``"ph": "C"``), drawn as a stack of its parts. Times are in microseconds, as the format wants them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autoplan.profiler.cost import OpCost
from autoplan.profiler.memory import Moment

TRACKS = ("forward", "backward", "optimizer")
PARTS = ("parameters", "gradients", "optimizer", "inputs", "saved", "temporaries")


def chrome_trace(model: str, nodes: Sequence[OpCost], timeline: Sequence[Moment], optimizer_s: float) -> dict[str, Any]:
    """Trace events of a step.

    Args:
        model: Name of the process.
        nodes: Ops in program order; backward runs them in reverse.
        timeline: Moments of memory, in order.
        optimizer_s: Seconds of the update.
    """
    events: list[dict[str, Any]] = [_named("process_name", 0, model)]
    events += [_named("thread_name", tid, name) for tid, name in enumerate(TRACKS, 1)]
    starts: dict[tuple[str, str], float] = {}
    now = 0.0
    for n in nodes:
        starts["forward", n.key] = now
        if n.forward_s:
            counts = (n.forward_flops, n.forward_elementwise, n.forward_read_bytes, n.forward_written_bytes)
            events.append(_event(n, 1, now, n.forward_s, counts))
        now += n.forward_s
    begun = {"forward": 0.0, "backward": now}
    for n in reversed(nodes):
        starts["backward", n.key] = now
        if n.backward_s:
            counts = (n.backward_flops, n.backward_elementwise, n.backward_read_bytes, n.backward_written_bytes)
            events.append(_event(n, 2, now, n.backward_s, counts))
        now += n.backward_s
    begun["step"] = now
    if optimizer_s:
        events.append({"name": "update", "ph": "X", "pid": 1, "tid": 3, "ts": now * 1e6, "dur": optimizer_s * 1e6})
    events += _memory(timeline, starts, begun, optimizer_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}


def _event(n: OpCost, tid: int, start: float, seconds: float, counts: tuple[int, int, int, int]) -> dict[str, Any]:
    names = ("flops", "elementwise", "read_bytes", "written_bytes")
    args = {"key": n.key, "module": n.module, **dict(zip(names, counts, strict=True))}
    return {"name": n.op, "ph": "X", "pid": 1, "tid": tid, "ts": start * 1e6, "dur": seconds * 1e6, "args": args}


def _memory(
    timeline: Sequence[Moment], starts: dict[tuple[str, str], float], begun: dict[str, float], optimizer_s: float
) -> Iterator[dict[str, Any]]:
    """One sample per moment; the update's moments are spread over its seconds."""
    updates = sum(m.phase == "step" for m in timeline)
    now, done = 0.0, 0
    for m in timeline:
        at = starts.get((m.phase, m.op), begun[m.phase])
        if m.phase == "step":
            at += optimizer_s * done / updates
            done += 1
        now = max(now, at)
        yield {"name": "memory", "ph": "C", "pid": 1, "ts": now * 1e6, "args": {p: getattr(m, p) for p in PARTS}}
