"""Exported program -> `OpGraph`: one op per composite ATen call, ties resolved, what does nothing removed."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from autoplan.errors import TraceError, UnsupportedOpError
from autoplan.ir import Arg, GraphInput, Op, OpGraph, Ref, TensorSpec
from autoplan.trace.compat import FakeTensor, pytree
from autoplan.trace.normalise import functionalise, inline_regions

_NO_GRADIENT = {"detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"}
_NO_GRADIENT |= {"new_zeros", "new_ones", "new_full", "new_empty"}
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "conv1d", "conv2d", "conv3d", "convolution"})
_IGNORED = {"_assert_tensor_metadata", "sym_constrain_range_for_size", "_assert_scalar"}


def build_graph(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    prefix: str,
    low: torch.dtype | None,
    updates_buffers: bool = False,
) -> tuple[OpGraph, tuple[str | None, ...], Any, frozenset[str]]:
    """Builds the graph of an exported program.

    Args:
        exported: From ``torch.export.export(strict=False)``.
        model: The user's module, for original parameter names, dtypes and ties.
        args: The user's positional inputs.
        kwargs: The user's keyword inputs.
        prefix: What the export put before the model's own paths.
        low: dtype that floating parameters and inputs were lowered to, or None.
        updates_buffers: Whether the model may change buffers, of which the graph keeps nothing.

    Returns:
        The graph; per flattened input leaf its graph path or None; the output pytree; keys of ops that were in place.

    Raises:
        UnsupportedOpError: A node that this version cannot represent; quotes its source line.
    """
    builder = _Builder(model, prefix, low, exported.constants)
    gm: fx.GraphModule = exported.module(check_guards=False)
    _check_shapes(gm, builder)
    inline_regions(gm, builder.where)
    functionalise(gm, builder.where, builder.describe, may_change=builder.is_buffer if updates_buffers else None)
    leaves = pytree.tree_flatten_with_path((args, kwargs))[0]
    builder.placeholders(gm.graph, leaves)
    for node in gm.graph.nodes:
        builder.add(node)
    graph = builder.finish(gm, exported)
    used = {i.path for i in graph.inputs if i.kind == "input"}
    paths = tuple(p if p in used else None for p in (_input_path(k) for k, _ in leaves))
    return graph, paths, exported.call_spec.out_spec, frozenset(builder.in_place)


def _check_shapes(gm: fx.GraphModule, builder: _Builder) -> None:
    for node in gm.graph.nodes:
        values = pytree.tree_leaves(node.meta.get("val"))
        sizes = [n for x in values for n in (x.shape if isinstance(x, torch.Tensor) else [x])]
        if any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in sizes):
            raise UnsupportedOpError(
                f"a size or a number is read from values{builder.where(node)}: a step needs fixed shapes. "
                "Instead of .item(), nonzero and x[mask] keep all elements, and use torch.where or multiply by the mask"
            )


def _input_path(key: Sequence[Any]) -> str:
    """``kwargs["input_ids"]`` -> ``input_ids``; ``args[0]`` -> ``args.0``."""
    parts = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in key]
    return ".".join(parts[1:]) if parts[0] == "1" else ".".join(["args", *parts[1:]])


class _Builder:
    """State of one conversion; `finish` gives the graph."""

    def __init__(
        self, model: nn.Module, prefix: str, low: torch.dtype | None, constants: Mapping[str, Any] | None = None
    ) -> None:
        self.model, self.prefix, self.low, self.constants = model, prefix, low, constants or {}
        self.tracked: set[str] = set()  # values that gradients flow to
        self.inputs: dict[str, GraphInput] = {}
        self.ops: list[Op] = []
        self.in_place: set[str] = set()
        self.values: dict[str, TensorSpec] = {}
        self.alias: dict[str, str] = {}  # fx node name -> value it stands for
        self.ordinals: dict[str, int] = {}
        self.outputs: list[str] = []
        self.getitems: dict[str, dict[int, str]] = {}
        self.names: dict[int, list[str]] = {}
        pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, tensor in pairs:
            self.names.setdefault(id(tensor), []).append(name)
        self.by_path = {n: self.names[id(t)] for n, t in pairs}
        self.tensors = dict(pairs)
        self.seen: dict[str, str] = {}  # canonical path -> value

    def placeholders(self, graph: fx.Graph, leaves: Sequence[tuple[Any, Any]]) -> None:
        nodes = [n for n in graph.nodes if n.op == "placeholder"]
        for node, (key, leaf) in zip(nodes, leaves, strict=True):
            if isinstance(node.meta.get("val"), torch.Tensor):
                self._input(node, "input", _input_path(key), (), leaf)

    def _input(self, node: fx.Node, kind: Any, path: str, aliases: tuple[str, ...], given: torch.Tensor) -> None:
        spec = _spec(node.meta["val"])
        spec = TensorSpec(spec.shape, spec.dtype, kind == "parameter" and given.requires_grad)
        lowered = self.low is not None and spec.dtype == str(self.low)[6:] and given.dtype == torch.float32
        if spec.requires_grad:
            self.tracked.add(node.name)
        if not lowered:
            self.inputs[node.name] = GraphInput(node.name, kind, path, aliases)
            self.values[node.name] = spec
            return
        master = f"{node.name}_fp32"
        self.inputs[master] = GraphInput(master, kind, path, aliases)
        self.values[master] = TensorSpec(spec.shape, "float32", spec.requires_grad)
        if spec.requires_grad:
            self.tracked.add(master)
        self.values[node.name] = spec
        self.ops.append(
            Op(
                f"{path}:cast",
                "aten.to.dtype",
                (Ref(master), str(self.low)),
                {},
                (node.name,),
                path.rpartition(".")[0] if kind != "input" else "",
            )
        )

    def add(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self._attribute(node)
        elif node.op == "output":
            for key, leaf in pytree.tree_flatten_with_path(node.args[0])[0]:
                if not isinstance(leaf, fx.Node):
                    raise UnsupportedOpError(
                        f"the model returns {leaf!r} beside tensors (result{pytree.keystr(key)}): return tensors only"
                    )
                self.outputs.append(self._resolve(leaf.name))
        elif node.op == "call_function" and node.target is not operator.getitem:
            self._call(node)

    def describe(self, node: fx.Node) -> str:
        """What a node that the graph is given is to the user."""
        if node.op == "placeholder":
            return f"the input {node.name!r}"
        path = str(node.target).removeprefix(self.prefix)
        return f"the {'parameter' if isinstance(self.tensors.get(path), nn.Parameter) else 'buffer'} {path!r}"

    def is_buffer(self, node: fx.Node) -> bool:
        """Whether a node is a buffer of the model."""
        path = str(node.target).removeprefix(self.prefix)
        return node.op == "get_attr" and path in self.tensors and not isinstance(self.tensors[path], nn.Parameter)

    def where(self, node: fx.Node) -> str:
        """A node's module and line, for messages."""
        module = _module(node, self.prefix)
        place = f"module {module!r}" if module else "the model's top level"
        return f" ({place}, {_source(node) or 'unknown line'})"

    def _attribute(self, node: fx.Node) -> None:
        target = str(node.target)
        path = target.removeprefix(self.prefix)
        if path not in self.by_path:
            self._constant(node, target)
            return
        names = self.by_path[path]
        if names[0] in self.seen:
            self.alias[node.name] = self.seen[names[0]]
            return
        self.seen[names[0]] = node.name
        kind = "parameter" if isinstance(self.tensors[path], nn.Parameter) else "buffer"
        self._input(node, kind, names[0], tuple(names[1:]), self.tensors[path])

    def _constant(self, node: fx.Node, target: str) -> None:
        """A tensor made in the model's code: a single number becomes an op that makes it."""
        constant = self.constants.get(target)
        if not isinstance(constant, torch.Tensor):
            return  # the body of a higher-order op, which `_call` reports
        if constant.numel() != 1 or isinstance(constant, FakeTensor):
            user = next(iter(node.users), node)
            raise UnsupportedOpError(
                f"the model uses a tensor of shape {tuple(constant.shape)} that is neither parameter nor buffer"
                f"{self.where(user)}: register it with register_buffer, so that it can be placed"
            )
        self.values[node.name] = _spec(constant)
        ordinal = self.ordinals[":constant"] = self.ordinals.get(":constant", -1) + 1
        kwargs: dict[str, Arg] = {"dtype": str(constant.dtype), "device": "device:cpu", "pin_memory": False}
        args = (tuple(constant.shape), constant.item())
        self.ops.append(Op(f":constant#{ordinal}", "aten.full.default", args, kwargs, (node.name,)))

    def _call(self, node: fx.Node) -> None:
        target = str(node.target)
        name = target.split(".")[1] if target.count(".") else target
        if name in _IGNORED:
            return
        if target == "aten.view.dtype":
            raise UnsupportedOpError(f"a view as another dtype cannot be represented yet{self.where(node)}")
        if not target.startswith(("aten.", "prims.")) and "::" not in str(getattr(node.target, "_schema", "")):
            raise UnsupportedOpError(f"{target} cannot be represented yet{self.where(node)}")
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if first is not None:
            base = self._resolve(first.name)
            if _does_nothing(node, first, name) or (name == "detach" and base not in self.tracked):
                self.alias[node.name] = base
                return
        self._check_dtypes(node, name)
        value = node.meta.get("val")
        outputs: tuple[str, ...] = (node.name,)
        if isinstance(value, torch.Tensor):
            self.values[node.name] = _spec(value)
        else:
            outputs = self._outputs(node, value)
        module = _module(node, self.prefix)
        stem = f"{module}:{target.rsplit('.', 1)[0]}"
        ordinal = self.ordinals[stem] = self.ordinals.get(stem, -1) + 1
        args = tuple(self._arg(a) for a in node.args)
        op = Op("", target, args, {k: self._arg(v) for k, v in node.kwargs.items()}, outputs)
        if name not in _NO_GRADIENT and any(v in self.tracked for v in op.inputs):
            self.tracked.update(o for o in outputs if self.values[o].is_float)
        if name in ("view", "reshape", "_unsafe_view", "expand"):
            args = (args[0], tuple(self.values[node.name].shape), *args[2:])
        if node.meta.get("in_place"):
            self.in_place.add(f"{stem}#{ordinal}")
        self.ops.append(
            Op(
                f"{stem}#{ordinal}",
                target,
                args,
                op.kwargs,
                outputs,
                module,
                _source(node),
            )
        )

    def _check_dtypes(self, node: fx.Node, name: str) -> None:
        """Fake tensors let a product of different dtypes pass; eager execution does not."""
        if name not in _PRODUCTS:
            return
        values = [a.meta.get("val") for a in node.args if isinstance(a, fx.Node)]
        dtypes = dict.fromkeys(str(v.dtype)[6:] for v in values if isinstance(v, torch.Tensor))
        if len(dtypes) > 1:
            raise TraceError(f"{name} is given operands of several dtypes, {', '.join(dtypes)}{self.where(node)}")

    def _outputs(self, node: fx.Node, value: Any) -> tuple[str, ...]:
        """Names of a multi-output op: its getitem nodes, in order; unused outputs get a name of their own."""
        if not isinstance(value, list | tuple):
            raise UnsupportedOpError(
                f"{node.target} returns a number (.item()), not tensors{self.where(node)}: the step cannot depend on "
                "the value of a tensor"
            )
        items = [(u.args[1], u.name) for u in node.users if u.target is operator.getitem]
        names = {i: name for i, name in reversed(items) if isinstance(i, int)}
        self.alias.update({name: names[i] for i, name in items if isinstance(i, int)})
        out = []
        for i, v in enumerate(value):
            name = names.get(i, f"{node.name}_{i}")
            self.values[name] = _spec(v)
            out.append(name)
        return tuple(out)

    def _resolve(self, name: str) -> str:
        while name in self.alias and self.alias[name] != name:
            name = self.alias[name]
        return name

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return Ref(self._resolve(arg.name))
        if isinstance(arg, list | tuple):
            return tuple(self._arg(a) for a in arg)
        if isinstance(arg, torch.device):
            return f"device:{arg.type}"
        if isinstance(arg, torch.dtype | torch.layout | torch.memory_format):
            return str(arg)
        if isinstance(arg, bool | int | float | str) or arg is None:
            return arg
        raise UnsupportedOpError(f"an argument of type {type(arg).__name__} cannot be represented yet")

    def finish(self, gm: fx.GraphModule, exported: torch.export.ExportedProgram) -> OpGraph:
        live = set(self.outputs)
        ops = []
        for op in reversed(self.ops):
            if any(o in live for o in op.outputs):
                live.update(op.inputs)
                ops.append(op)
        ops.reverse()
        inputs = tuple(i for i in self.inputs.values() if i.value in live)
        kept = {i.value for i in inputs} | {o for op in ops for o in op.outputs}
        values = {v: TensorSpec(s.shape, s.dtype, v in self.tracked) for v, s in self.values.items() if v in kept}
        loss = _find_loss(values, self.outputs, exported, bool(self.prefix))
        ordered = tuple(_casts_at_first_use(ops, inputs))
        return OpGraph(inputs, ordered, values, tuple(self.outputs), loss, type(self.model).__name__).verify()


def _casts_at_first_use(ops: Sequence[Op], inputs: Sequence[GraphInput]) -> Iterator[Op]:
    """Moves the casts of lowered inputs to where they are needed: memory is held shorter, and blocks stay alike."""
    given = {i.value for i in inputs}
    casts = {op.outputs[0]: op for op in ops if op.key.endswith(":cast") and set(op.inputs) <= given}
    waiting = dict(casts)
    for op in ops:
        if op.outputs[0] in casts:
            continue
        for v in op.inputs:
            if v in waiting:
                yield waiting.pop(v)
        yield op
    yield from waiting.values()


def _does_nothing(node: fx.Node, first: fx.Node, name: str) -> bool:
    """Casts to the same dtype, aliases, dropout that drops nothing, copies of what is contiguous already."""
    before, after = first.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    same = before.dtype == after.dtype and bool(before.shape == after.shape)
    if name in ("to", "alias", "lift_fresh_copy", "_to_copy"):
        return same
    if name in ("dropout", "feature_dropout", "alpha_dropout"):
        return bool(not node.args[2] or node.args[1] == 0)
    if name in ("view", "reshape", "expand"):
        return same
    return name == "contiguous" and bool(before.is_contiguous())


def _find_loss(
    values: Mapping[str, TensorSpec], outputs: Sequence[str], exported: torch.export.ExportedProgram, wrapped: bool
) -> int | None:
    if wrapped:
        return 0
    spec: Any = exported.call_spec.out_spec
    scalars = [i for i, o in enumerate(outputs) if values[o].requires_grad and values[o].numel == 1]
    names = list(spec.context or []) if isinstance(spec.context, list | tuple) else []
    if "loss" in names and names.index("loss") in scalars:
        return names.index("loss")
    return scalars[0] if scalars else None


def _spec(value: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(int(n) for n in value.shape), str(value.dtype)[6:], value.requires_grad)


def _module(node: fx.Node, prefix: str) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    root = prefix.rstrip(".")
    return path[len(prefix) :] if prefix and path.startswith(prefix) else ("" if path == root else path)


def _source(node: fx.Node) -> str:
    lines = [x.strip() for x in (node.meta.get("stack_trace") or "").strip().splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("File "):
            place = lines[i].split('"')
            where = place[1].rsplit("/", 1)[-1] + place[2].replace(", line ", ":").replace(", in ", " in ")
            return f"{where}: {lines[i + 1]}" if i + 1 < len(lines) else where
    return ""
