"""What is known of a tensor without holding it: shape, dtype, whether gradients flow to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autoplan.errors import AutoplanError

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
FLOAT_DTYPES = frozenset(name for name in DTYPE_BYTES if name.startswith(("float", "bfloat", "complex")))


@dataclass(frozen=True)
class TensorSpec:
    """Shape (elements per dim), dtype name without the ``torch.`` prefix, and whether autograd tracks it."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise AutoplanError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense copy."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether gradients can exist for it."""
        return self.dtype in FLOAT_DTYPES

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def to_json(self) -> list[Any]:
        """``[dtype, shape]`` with a trailing ``"grad"`` where autograd tracks the tensor."""
        return [self.dtype, list(self.shape), *(["grad"] if self.requires_grad else [])]

    @classmethod
    def from_json(cls, data: list[Any]) -> TensorSpec:
        """Inverse of `to_json`."""
        return cls(tuple(data[1]), data[0], len(data) > 2)
