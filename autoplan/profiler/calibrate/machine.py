"""The clock of calibration: repeats, their median and their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Sample:
    """Seconds of something: the median of repeats, and their spread relative to it."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Machine:
    """How to measure here: the device, whether CPU seconds count, and how long."""

    device: torch.device
    cpu_seconds: bool
    repeats: int
    slice_s: float

    def now(self) -> float:
        """Seconds on the clock that counts here, once the device has caught up."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.cpu_seconds else time.perf_counter()

    def sample(self, run: Callable[[], object], per: int = 1) -> Sample:
        """Seconds of ``run()`` divided by `per`, calls repeated until a repeat lasts `slice_s`."""
        run()
        begun = self.now()
        run()
        calls = max(1, int(self.slice_s / max(self.now() - begun, 1e-7)))
        times: list[float] = []
        end = self._end()
        while len(times) < self.repeats and (len(times) < 2 or time.monotonic() < end):
            begun = self.now()
            for _ in range(calls):
                run()
            times.append((self.now() - begun) / calls / per)
        return summary(times)

    def _end(self) -> float:
        """When no further repeats are made, however few there are: on a busy machine all of them take too long."""
        return time.monotonic() + 3 * self.repeats * self.slice_s

    def difference(self, less: Callable[[], object], more: Callable[[], object]) -> tuple[Sample, Sample]:
        """Seconds of ``less()``, and by how much ``more()`` takes longer; the two take turns, so that drifts cancel."""
        more()
        begun = self.now()
        more()
        calls = max(1, int(self.slice_s / max(self.now() - begun, 1e-7)))
        short: list[float] = []
        longer: list[float] = []
        end = self._end()
        while len(short) < self.repeats and (len(short) < 2 or time.monotonic() < end):
            times = []
            for run in (less, more):
                begun = self.now()
                for _ in range(calls):
                    run()
                times.append((self.now() - begun) / calls)
            short.append(times[0])
            longer.append(max(times[1] - times[0], 0.1 * times[1]))
        return summary(short), summary(longer)

    def cold(self, run: Callable[[], object], per: int) -> Sample:
        """Seconds of one ``run()`` divided by `per`, after other work has filled the caches."""
        other = torch.empty(1 << 23, device=self.device)
        run()
        times = []
        for _ in range(self.repeats):
            other.fill_(1.0)
            begun = self.now()
            run()
            times.append((self.now() - begun) / per)
        return summary(times)


def summary(times: Sequence[float]) -> Sample:
    """The median and how far the quartiles are apart."""
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return Sample(median, (high - low) / median if median else 0.0)


def rising(rows: Points) -> Points:
    """Rows by size whose seconds are at least those of the size before; rounding cannot break the efficiency."""
    out: Points = []
    for size, seconds in rows:
        out.append((size, max(seconds, 1.002 * out[-1][1]) if out else seconds))
    return out


def net(sample: Sample, overhead: float) -> Sample:
    """Seconds without the overhead of a launch; a twentieth stays, as neither figure is exact."""
    return Sample(max(sample.seconds - overhead, 0.05 * sample.seconds), sample.spread)
