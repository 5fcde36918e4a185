"""The private torch API that tracing needs, in one place. Verified against torch 2.13.

`FakeTensorMode` lives in a private module although it is documented as the way to trace without data
(pytorch.org/docs/stable/torch.compiler_fake_tensor.html); no public name exports it.

The specs of inputs and outputs that `torch.export` returns, and the registrations of transformers' `ModelOutput`s, are
objects of `torch.utils._pytree`.
"""

import torch
import torch._prims_common
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


def node_sequence() -> int:
    """Number that the next autograd node gets.

    Private because torch numbers nodes for its profiler only.
    """
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def autograd_sequence() -> int | None:
    """Number of the autograd node that runs, or None.

    Private because torch offers the current node to its own tools only.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def accumulates_in_place(gradient: torch.Tensor) -> bool:
    """Whether the engine, on ordinary tensors, would add to `gradient` in place: nobody else holds it.

    The rule is `can_accumulate_inplace` of torch/csrc/autograd/functions/accumulate_grad.h and input_buffer.cpp. On
    fake tensors the engine itself never does. Counts of holders are not public; 4 and 2 are those of a tensor and its
    storage that only the engine and the running dispatch mode hold.
    """
    storage = gradient.untyped_storage()
    holders: int = gradient._use_count()  # type: ignore[attr-defined]
    alone = holders <= 4 and torch._C._storage_Use_Count(storage._cdata) <= 2
    return alone and torch._prims_common.is_non_overlapping_and_dense_or_false(gradient)


def storage_key(x: torch.Tensor) -> int:
    """Identity of a storage: only its C++ address is stable."""
    return int(x.untyped_storage()._cdata)


__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "accumulates_in_place",
    "autograd_sequence",
    "node_sequence",
    "pytree",
    "storage_key",
]
