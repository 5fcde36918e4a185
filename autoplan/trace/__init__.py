"""From an `nn.Module` and an example batch to an `OpGraph`, without allocating a single weight."""

from autoplan.trace.capture import TracedModel, trace
from autoplan.trace.replay import replay

__all__ = ["TracedModel", "replay", "trace"]
