"""What kernels allocate while they run, beyond their results: the w(i) of `autoplan.codegen.liveness`.

Only what CPU kernels of torch were seen to allocate in noticeable amounts is listed.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from autoplan.codegen.program import value_of

aten = torch.ops.aten


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that the kernel of a node holds at its worst moment besides arguments and results."""
    return 0


_ = (math, value_of)
