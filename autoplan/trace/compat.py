"""The private torch API that tracing needs, in one place.

`FakeTensorMode` lives in a private module although it is documented as the way to trace without data
(pytorch.org/docs/stable/torch.compiler_fake_tensor.html); no public name exports it.
"""

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode"]
