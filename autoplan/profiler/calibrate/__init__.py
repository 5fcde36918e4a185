"""Measures the machine that it runs on and writes a profile file. The only part of this room that imports torch.

Every figure is the median of repeats; the spread that a source quotes is the distance between the quartiles relative
to the median. What runs on one thread of a CPU is timed in CPU seconds, which other processes hardly disturb; threads,
GPUs and collectives are timed by the clock. Measured are, in this order:

- on a CPU new tensors over sizes, less the same work in memory that exists,
- the overhead of an op and of a view in eager autograd; AdamW's update of one parameter over sizes,
- matrix products over sizes and dtypes, copies over sizes,                                           `device`
- ops that run far from the rate of a matrix product, in the operations that the profiler counts,    `rates`
- collectives over payloads and numbers of processes, with NCCL where there are as many GPUs, else with gloo. `links`
"""

from autoplan.profiler.calibrate.write import calibrate

__all__ = ["calibrate"]
