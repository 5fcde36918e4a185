"""Makes an exported graph flat and functional, which is what an `OpGraph` can hold.

`inline_regions` puts the bodies of ``no_grad`` and switched-off ``autocast`` blocks, which export hides in submodules,
back in line; what a ``no_grad`` block reads is detached. `functionalise` replaces ``y.add_(x)`` by ``add(y, x)`` where
nothing else can see the difference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx

from autoplan.errors import UnsupportedOpError
from autoplan.trace.compat import pytree

_STATISTICS = {"batch_norm": 5, "instance_norm": 5, "cudnn_batch_norm": 5, "native_batch_norm": 5}
"""Ops that update running statistics though their schema does not say so -> position of the flag that makes them."""
Where = Callable[[fx.Node], str]


def inline_regions(gm: fx.GraphModule, where: Where, *, tracking: bool = True) -> None:
    """Replaces ``no_grad`` and disabled ``autocast`` regions by their contents.

    Args:
        gm: Changed in place.
        where: Describes a node's place in the user's model.
        tracking: Whether gradients are recorded around `gm`.

    Raises:
        UnsupportedOpError: An autocast region that casts, or ``enable_grad`` within ``no_grad``.
    """
    for node in list(gm.graph.nodes):
        name = str(node.target) if node.op == "call_function" else ""
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *operands = node.args
            if enabled and not tracking:
                raise UnsupportedOpError(f"enable_grad within no_grad is not supported{_inside(gm, body, where)}")
            _inline(gm, node, body, operands, where, detach=tracking and not enabled, tracking=bool(enabled))
        elif name == "wrap_with_autocast":
            _, _, enabled, _, body, *operands = node.args
            if enabled:
                raise UnsupportedOpError(
                    f"autocast inside the model is not supported{_inside(gm, body, where)}: remove it and ask for "
                    "precision='bf16'"
                )
            _inline(gm, node, body, operands, where, detach=False, tracking=tracking)


def _inline(
    gm: fx.GraphModule, call: fx.Node, body: Any, operands: list[Any], where: Where, *, detach: bool, tracking: bool
) -> None:
    inner = gm.get_submodule(str(body.target))
    assert isinstance(inner, fx.GraphModule)
    inline_regions(inner, where, tracking=tracking)
    stack = next((n.meta.get("nn_module_stack") for n in inner.graph.nodes if n.op == "call_function"), None)
    env: dict[fx.Node, Any] = {}
    left = iter(operands)
    results: list[Any] = []
    with gm.graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(left)
                if detach and _is_float(env[node]):
                    env[node] = _detached(gm, env[node], stack)
            elif node.op == "output":
                results = list(pytree.tree_leaves(node.args[0]))
            else:
                env[node] = gm.graph.node_copy(node, lambda n: env[n])
    for user in list(call.users):
        result = results[int(user.args[1])]  # type: ignore[arg-type]
        user.replace_all_uses_with(env[result])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)


def _detached(gm: fx.GraphModule, operand: fx.Node, stack: Any) -> fx.Node:
    node = gm.graph.call_function(torch.ops.aten.detach.default, (operand,))
    node.meta = {"val": operand.meta["val"].detach(), "nn_module_stack": stack}
    return node


def _is_float(operand: Any) -> bool:
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _inside(gm: fx.GraphModule, body: Any, where: Where) -> str:
    inner = gm.get_submodule(str(body.target))
    assert isinstance(inner, fx.GraphModule)
    return next((where(n) for n in inner.graph.nodes if n.op == "call_function"), "")


def functionalise(
    gm: fx.GraphModule,
    where: Where,
    describe: Callable[[fx.Node], str],
    *,
    may_change: Callable[[fx.Node], bool] | None = None,
) -> None:
    """Replaces in-place ops by their functional twins.

    Args:
        gm: Flat graph; changed in place.
        where: Describes a node's place in the user's model.
        describe: Names a parameter, buffer or input of the model.
        may_change: Whether a node that the graph is given may be written; its new value is seen by what follows in
            the graph, and then lost.

    Raises:
        UnsupportedOpError: Something else could see the change: a parameter, buffer or input is written, or another
            view of the same memory is read afterwards.
    """
    memory = _Memory(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if may_change is None:
            _check_statistics(node, where)
        if not any(_writes(a) for a in _schema(node)):
            continue
        base = node.args[0] if node.args else None
        if not isinstance(base, fx.Node) or [_writes(a) for a in _schema(node)].count(True) != 1:
            raise UnsupportedOpError(f"{node.target} writes to its operands{where(node)}: write it out of place")
        bases = _views_up(base)
        _check_unseen(node, bases, memory, where, describe, may_change)
        new = _functional(gm, node, base, where)
        memory.replace(node, new)
        node.replace_all_uses_with(new)
        for view, below in zip(bases, [None, *bases], strict=False):
            if below is not None:
                new = _scattered(gm, node, view, below, new)
                memory.add(new, view, node)
            view.replace_all_uses_with(new, delete_user_cb=lambda u, at=node: memory.after(u, at))  # type: ignore[misc]
        gm.graph.erase_node(node)


class _Memory:
    """Which nodes share memory (conservatively), and the order of all nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order: dict[fx.Node, int] = {n: i for i, n in enumerate(graph.nodes)}
        self.root: dict[fx.Node, fx.Node] = {}
        self.members: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            source = _shares_with(node)
            root = node if source is None else self.root.get(source, source)
            self.root[node] = root
            self.members.setdefault(root, []).append(node)

    def sharing(self, node: fx.Node) -> list[fx.Node]:
        return self.members[self.root[node]]

    def after(self, user: fx.Node, node: fx.Node) -> bool:
        return self.order.get(user, -1) > self.order[node]

    def add(self, new: fx.Node, like: fx.Node, at: fx.Node) -> None:
        """`new` stands for the memory of `like` from `at` on."""
        self.order[new], self.root[new] = self.order[at], self.root[like]
        self.members[self.root[like]].append(new)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        self.order[new], self.root[new] = self.order[old], self.root[old]
        members = self.members[self.root[old]]
        members[members.index(old)] = new


def _shares_with(node: fx.Node) -> fx.Node | None:
    """The operand whose memory a node's result may share."""
    if node.op != "call_function":
        return None
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    dropout = "dropout" in str(node.target)  # returns its operand where it drops nothing
    shares = dropout or any(a.alias_info is not None for a in _schema(node))
    if node.target is operator.getitem:  # shares with what its op shares with: a piece of a split does, topk's do not
        shares = _shares_with(first) is not None
    return first if shares else None


def _schema(node: fx.Node) -> Iterator[Any]:
    schema = getattr(node.target, "_schema", None)
    yield from schema.arguments if schema is not None else ()


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


_SCATTERS = {"slice": torch.ops.aten.slice_scatter.default, "select": torch.ops.aten.select_scatter.default}
_RESHAPES = frozenset({"view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"})


def _views_up(base: fx.Node) -> list[fx.Node]:
    """A written view and what it is a view of, as far up as `_scattered` can put the new values back."""
    out = [base]
    while (up := _shares_with(out[-1])) is not None and _op(out[-1]) in {*_SCATTERS, *_RESHAPES}:
        out.append(up)
    return out


def _op(node: fx.Node) -> str:
    return [*str(node.target).split("."), ""][1]


def _scattered(gm: fx.GraphModule, at: fx.Node, whole: fx.Node, view: fx.Node, new: fx.Node) -> fx.Node:
    """`whole` with the values of its `view` replaced by `new`."""
    before, part = whole.meta["val"], new.meta["val"]
    name = _op(view)
    with before.fake_mode, gm.graph.inserting_before(at):
        if name in _SCATTERS:
            made = gm.graph.call_function(_SCATTERS[name], (whole, new, *view.args[1:]), view.kwargs)
            value = _SCATTERS[name](before, part, *view.args[1:], **view.kwargs)
        else:
            made = gm.graph.call_function(torch.ops.aten.reshape.default, (new, list(before.shape)))
            value = part.reshape(before.shape)
    made.meta = {**at.meta, "val": value}
    return made


def _check_unseen(
    node: fx.Node,
    bases: list[fx.Node],
    memory: _Memory,
    where: Where,
    describe: Callable[[fx.Node], str],
    may_change: Callable[[fx.Node], bool] | None,
) -> None:
    for other in memory.sharing(bases[0]):
        if other.op in ("placeholder", "get_attr"):
            if may_change is not None and may_change(other):
                continue
            raise UnsupportedOpError(
                f"in-place {node.target} changes {describe(other)}{where(node)}: a step cannot change what it is "
                "given, other than by the optimizer. Write it out of place; put layers that keep running statistics "
                "into eval mode, or give them track_running_stats=False"
            )
        taken_before = other not in (*bases, node) and not memory.after(other, node)
        if taken_before and any(memory.after(u, node) for u in other.users):
            raise UnsupportedOpError(
                f"in-place {node.target} writes to memory that is read afterwards through another view"
                f"{where(node)}: write it out of place"
            )


def _functional(gm: fx.GraphModule, node: fx.Node, base: fx.Node, where: Where) -> fx.Node:
    """The functional twin of an in-place node, with a cast where that would promote the dtype."""
    namespace, name, overload = (*str(node.target).split("."), "default")[:3]
    twin = getattr(getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None), overload, None)
    if twin is None or not name.endswith("_"):
        raise UnsupportedOpError(f"in-place {node.target} has no functional twin{where(node)}: write it out of place")
    before = base.meta["val"]
    values = pytree.tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    with before.fake_mode:
        value = twin(*values[0], **values[1])
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(twin, node.args, node.kwargs)
        new.meta = {**node.meta, "val": value, "in_place": value.dtype == before.dtype}
        if value.dtype != before.dtype:
            new = gm.graph.call_function(torch.ops.aten.to.dtype, (new, before.dtype))
            new.meta = {**node.meta, "val": value.to(before.dtype)}
    return new


def _check_statistics(node: fx.Node, where: Where) -> None:
    name = str(node.target).split(".")[1] if "." in str(node.target) else ""
    flag = _STATISTICS.get(name)
    if flag is not None and len(node.args) > flag and node.args[flag] and node.args[3] is not None:
        raise UnsupportedOpError(
            f"{node.target} updates running statistics{where(node)}: put the layer into eval mode, or give it "
            "track_running_stats=False"
        )
