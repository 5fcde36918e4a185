"""Plan + traced model -> one rank's forward, backward and inference `torch.fx.GraphModule`s.

Files in reading order: `program` (the artifact between sharding and differentiation), `collectives`, `attention` and
`rng` (what emitted code calls), `differentiate`, `partition`, `liveness`, `emit`; `compat` holds every use of torch
interfaces that are not public.
"""
