"""Unsharded local programs made by hand, so that code generation is tested without the sharder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from autoplan.codegen.attention import attention
from autoplan.codegen.program import LocalProgram, Note
from autoplan.ir import GraphInput, Mesh, Placement

aten = torch.ops.aten
Keep = Callable[[fx.Node], bool]


def unsharded(model: nn.Module, inputs: Mapping[str, torch.Tensor], keep: Keep = lambda n: True) -> LocalProgram:
    """Program of a whole model on a mesh of one device; the first result is the loss."""
    exported = torch.export.export(model, (), {k: v.clone() for k, v in inputs.items()}, strict=False)
    source = exported.module(check_guards=False)
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    graph, env = fx.Graph(), {}
    entries: list[GraphInput] = []
    by_tensor: dict[int, fx.Node] = {}

    def placeholder(kind: Any, path: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> fx.Node:
        node = graph.placeholder(path.replace(".", "_"))
        with fake:
            value = torch.empty(tensor.shape, dtype=tensor.dtype)
        node.meta["val"] = value.requires_grad_(tensor.requires_grad)
        entries.append(GraphInput(node.name, kind, path, aliases))
        return node

    for path, p in model.named_parameters():
        by_tensor[id(p)] = placeholder("parameter", path, p, tuple(names[id(p)][1:]))
    for path, b in model.named_buffers():
        by_tensor[id(b)] = placeholder("buffer", path, b)
    given = {path: placeholder("input", path, t) for path, t in inputs.items()}
    counts: dict[str, int] = {}
    for node in source.graph.nodes:
        if node.op == "placeholder":
            env[node] = given[node.name]
        elif node.op == "get_attr":
            tensor = source
            for part in node.target.split("."):
                tensor = getattr(tensor, part)
            if id(tensor) not in by_tensor:
                by_tensor[id(tensor)] = placeholder("buffer", node.target, tensor)
            env[node] = by_tensor[id(tensor)]
        elif node.op == "output":
            loss, *rest = pytree.tree_leaves(node.args[0])
            outs = [env[loss]]
            for r in rest:
                new = graph.call_function(aten.detach.default, (env[r],))
                new.meta["val"] = r.meta["val"]
                Note(role="output").write(new)
                outs.append(new)
            graph.output(tuple(outs))
            shapes = tuple(tuple(m.meta["val"].shape) for m in (loss, *rest))
        elif node.target in (aten._assert_tensor_metadata.default,):
            continue
        else:
            env[node] = new = _copy(graph, node, env)
            new.meta["val"] = node.meta.get("val")
            module = list(node.meta["nn_module_stack"].values())[-1][0] if node.meta.get("nn_module_stack") else ""
            key = f"{module}:{node.target}"
            counts[key] = counts.get(key, -1) + 1
            Note(f"{key}#{counts[key]}", module, "op", keep(node), "").write(new)
    one = Placement.replicated(1)
    return LocalProgram(
        fx.GraphModule({}, graph), tuple(entries), (one,) * len(entries), (one,) * len(shapes), shapes, 0, Mesh((1,))
    )


def _copy(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
    if node.target is not aten.scaled_dot_product_attention.default or node.kwargs.get("dropout_p"):
        return graph.node_copy(node, lambda m: env[m])
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    args = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    q, k, v, mask = (args.get(n) for n in names[:4])
    if args.get("dropout_p"):
        return graph.node_copy(node, lambda m: env[m])
    return graph.call_function(
        attention,
        (
            env[q],
            env[k],
            env[v],
            env[mask] if mask is not None else None,
            bool(args.get("is_causal", False)),
            args.get("scale"),
            bool(args.get("enable_gqa", False)),
        ),
    )


def gpt2(dropout: float = 0.0, dtype: torch.dtype = torch.float32, layers: int = 2) -> nn.Module:
    """Tiny GPT-2 with a tied head, in training mode."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=64,
        n_head=4,
        vocab_size=97,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return _perturbed(transformers.GPT2LMHeadModel(config).to(dtype).train())


def llama(dtype: torch.dtype = torch.float32, layers: int = 2) -> nn.Module:
    """Tiny Llama with shared key/value heads."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=64,
        use_cache=False,
    )
    return _perturbed(transformers.LlamaForCausalLM(config).to(dtype).train())


def _perturbed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    return model


def batch(rows: int = 4, columns: int = 32, vocabulary: int = 97, seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids and labels with uneven label counts."""
    ids = torch.randint(0, vocabulary, (rows, columns), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, : columns // 2] = -100
    return {"input_ids": ids, "labels": labels}
