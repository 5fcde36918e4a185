"""What a model costs before any plan: flops, bytes, seconds and saved activations per op. Free of torch."""

from autoplan.profiler.flops import backward_flops, dtype_of, forward_flops, is_free, needs_backward, unknown_ops

__all__ = [
    "backward_flops",
    "dtype_of",
    "forward_flops",
    "is_free",
    "needs_backward",
    "unknown_ops",
]
