"""Memory that oneDNN's kernels keep on a CPU and that fake tensors do not show.

The LSTM kernel returns a workspace, which autograd saves; on fake tensors it is empty. oneDNN v3 (src/cpu/rnn/
rnn_utils.hpp) lays it out as gates, states and their gradients, for T steps of a batch of N, input size I and hidden
size H::

    bytes = 4 N (T ld(4H) + (T + 1) (6 ld(max(I, H)) + 5 ld(H)))                                               (1)

ld(n) rounds up to 16 elements, and adds 16 where that is a multiple of 256. The counts 6 and 5 were fitted to the sizes
that torch 2.13 returns for some shapes, checked by hand to about 2 % on a few; page rounding is left out, so that small
sizes are further off. Scratch memory of convolutions depends on the instruction set and is not modelled.
"""

from __future__ import annotations

from typing import Any

import torch


def hidden_bytes(func: Any, args: Any) -> dict[int, int]:
    """Index of a result -> bytes it has in truth, for ops whose fake results are smaller."""
    if func is not torch.ops.aten.mkldnn_rnn_layer.default:
        return {}
    x, weight, hidden, train = args[0], args[1], args[10], args[15]
    steps, batch, _ = x.shape
    wide, narrow, gates = _lead(max(weight.shape[1], hidden)), _lead(hidden), _lead(4 * hidden)
    return {3: 4 * batch * (steps * gates + (steps + 1) * (6 * wide + 5 * narrow))} if train else {}


def _lead(n: int) -> int:
    rounded: int = -(-n // 16) * 16
    return rounded + 16 * (rounded % 256 == 0)
