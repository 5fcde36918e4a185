"""The private torch API that tracing needs, in one place.

`FakeTensorMode` lives in a private module although it is documented as the way to trace without data
(pytorch.org/docs/stable/torch.compiler_fake_tensor.html); no public name exports it.

The specs of inputs and outputs that `torch.export` returns, and the registrations of transformers' `ModelOutput`s, are
objects of `torch.utils._pytree`.
"""

import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode", "pytree"]
