"""What kernels allocate while they run, beyond their results: the w(i) of `autoplan.codegen.liveness`.

Attention is the one op whose kernel allocates noticeably (read from torch's CPU flash kernel and equal to the byte to
its allocator's trace on one thread). Convolutions by oneDNN and LSTMs do as well, by amounts that no shape tells.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from autoplan.codegen import attention
from autoplan.codegen.program import value_of

_FORWARD = torch.ops.autoplan.attention.default
_BACKWARD = torch.ops.autoplan.attention_backward.default
_KEY_BLOCK = 512


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that the kernel of a node holds at its worst moment besides arguments and results."""
    if node.target is _FORWARD:
        q, k, v, mask = (_value(a) for a in node.args[:4])
        backward = False
    elif node.target is _BACKWARD:
        q, k, v, mask = (_value(a) for a in node.args[1:5])
        backward = True
    else:
        return 0
    assert q is not None and k is not None and v is not None
    return _mask_bytes(mask, q) + _repeated(q, k, v, _kernel(q, k, v, backward), backward)


def _value(arg: object) -> Tensor | None:
    return value_of(arg) if isinstance(arg, fx.Node) else None


def _mask_bytes(mask: Tensor | None, q: Tensor) -> int:
    """A mask of another type is converted."""
    return 0 if mask is None or mask.dtype == q.dtype else mask.numel() * q.element_size()


def _kernel(q: Tensor, k: Tensor, v: Tensor, backward: bool) -> int:
    """Blocks of scores that one thread works on; all scores where they are written out."""
    size = torch.float32.itemsize if q.element_size() < 4 else q.element_size()
    rows, columns = q.shape[2], k.shape[2]
    if not attention.flash_fits(q, v):
        return 3 * math.prod(q.shape[:3]) * columns * size
    block = min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32)
    keys = min(columns, _KEY_BLOCK)
    return block * size * (2 * keys + 1 if backward else keys + 2 + q.shape[3])


def _repeated(q: Tensor, k: Tensor, v: Tensor, kernel: int, backward: bool) -> int:
    """Adds copies of shared key and value heads, and in backward the gradients of these copies."""
    if q.shape[1] == k.shape[1]:
        return kernel
    group = q.shape[1] // k.shape[1]
    shared = _bytes(k) + _bytes(v)
    if not backward:
        return group * shared + kernel
    return 2 * group * shared + max(0, kernel - shared)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
