"""Plan + traced model -> one rank's forward, backward and inference `torch.fx.GraphModule`s.

Files in reading order: `shard` (plan -> local program), `program` (the artifact between sharding and
differentiation), `collectives`, `attention` and `rng` (what emitted code calls), `differentiate`, `partition` and
`write`, `liveness` and `workspace`, `emit`; `compat` holds every use of torch interfaces that are not public.
"""
