"""From an `nn.Module` and an example batch to an `OpGraph`, without allocating a single weight."""

from autoplan.trace.capture import TracedModel, trace

__all__ = ["TracedModel", "trace"]
