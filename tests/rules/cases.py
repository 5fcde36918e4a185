"""For every op with a rule, hypothesis strategies of calls of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Draw = Callable[[st.SearchStrategy[Any]], Any]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
CASES: dict[str, list[Callable[[Draw], Call]]] = {}
SIZES = st.sampled_from([1, 2, 3, 4, 6])


def case(*names: str) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    def add(fn: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
        for name in names:
            CASES.setdefault(name, []).append(fn)
        return fn

    return add


def shapes(draw: Draw, least: int = 1, most: int = 3) -> tuple[int, ...]:
    return tuple(draw(st.lists(SIZES, min_size=least, max_size=most)))


def real(*shape: int) -> Tensor:
    """Positive and away from kinks, so that every function is smooth there."""
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def flags(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5


def broadcast(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`."""
    kept = [n if draw(st.booleans()) else 1 for n in shape]
    return tuple(kept[draw(st.integers(0, len(kept))) :])


def dim_of(draw: Draw, rank: int) -> int:
    return draw(st.integers(-rank, rank - 1))


for _name, _target in {
    "add": "add.Tensor", "sub": "sub.Tensor", "rsub": "rsub.Tensor", "mul": "mul.Tensor", "div": "div.Tensor",
    "maximum": "maximum.default", "minimum": "minimum.default", "atan2": "atan2.default", "eq": "eq.Tensor",
    "ne": "ne.Tensor", "lt": "lt.Tensor", "le": "le.Tensor", "gt": "gt.Tensor", "ge": "ge.Tensor",
    "pow": "pow.Tensor_Tensor",
}.items():  # fmt: skip

    @case(_name)
    def _binary(draw: Draw, target: str = _target) -> Call:
        shape = shapes(draw)
        a, b = real(*broadcast(draw, shape)), real(*broadcast(draw, shape))
        return target, draw(st.sampled_from([(a, b), (b, a), (a, a)])), {}


for _name in ("logical_and", "logical_or", "logical_xor", "__and__", "__or__", "bitwise_and", "bitwise_or"):

    @case(_name)
    def _logical(draw: Draw, name: str = _name) -> Call:
        shape = shapes(draw)
        target = f"{name}.default" if name.startswith("logical") else f"{name}.Tensor"
        return target, (flags(*shape), flags(*broadcast(draw, shape))), {}


for _name, _args in {
    "add": (2.5,), "sub": (2.5,), "mul": (2.5,), "div": (2.5,), "rsub": (2.5,), "pow": (3,), "eq": (0.5,), "ne": (0.5,),
    "lt": (0.5,), "le": (0.5,), "gt": (0.5,), "ge": (0.5,), "remainder": (0.3,), "floor_divide": (0.3,),
}.items():  # fmt: skip

    @case(_name)
    def _scalar(draw: Draw, name: str = _name, args: tuple[Any, ...] = _args) -> Call:
        overload = {"pow": "Tensor_Scalar", "floor_divide": "Scalar"}.get(name, "Scalar")
        if name in ("add", "sub", "mul", "div"):
            overload = "Tensor"
        x = real(*shapes(draw))
        return f"{name}.{overload}", (x.detach() if name == "floor_divide" else x, *args), {}


@case("div")
def _rounded(draw: Draw) -> Call:
    mode = draw(st.sampled_from(["floor", "trunc", None]))
    return "div.Tensor_mode", (real(*shapes(draw)), 0.3), {"rounding_mode": mode}


@case("pow")
def _exponential(draw: Draw) -> Call:
    return "pow.Scalar", (2.0, real(*shapes(draw))), {}


for _name in (
    "neg", "contiguous", "clone", "alias", "detach", "tanh", "sigmoid", "exp", "rsqrt", "sqrt", "reciprocal", "relu",
    "silu", "mish", "elu", "selu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "sin", "cos",
    "log", "log1p", "expm1", "erf", "abs", "square", "log_sigmoid", "relu6", "celu", "gelu", "logical_not", "isnan",
    "isinf", "isfinite", "sign", "floor", "ceil", "round", "trunc", "zeros_like", "ones_like", "bitwise_not",
):  # fmt: skip

    @case(_name)
    def _unary(draw: Draw, name: str = _name) -> Call:
        shape = shapes(draw, 0)
        return f"{name}.default", (flags(*shape) if name in ("logical_not", "bitwise_not") else real(*shape),), {}


@case("to", "_to_copy")
def _cast(draw: Draw) -> Call:
    return "to.dtype", (real(*shapes(draw)), draw(st.sampled_from([torch.float64, torch.float32]))), {}


@case("type_as")
def _type_as(draw: Draw) -> Call:
    shape = shapes(draw)
    return "type_as.default", (real(*shape), real(*shape).detach().float()), {}


@case("full_like", "empty_like")
def _like(draw: Draw) -> Call:
    return "full_like.default", (real(*shapes(draw)), 3.0), {}


@case("clamp", "clamp_min", "clamp_max")
def _clamp(draw: Draw) -> Call:
    shape = shapes(draw)
    if draw(st.booleans()):
        return "clamp.default", (real(*shape), 0.3, 0.6), {}
    return "clamp.Tensor", (real(*shape), real(*broadcast(draw, shape))), {}


@case("where")
def _where(draw: Draw) -> Call:
    shape = shapes(draw)
    return "where.self", (flags(*broadcast(draw, shape)), real(*shape), real(*broadcast(draw, shape))), {}


@case("masked_fill")
def _masked_fill(draw: Draw) -> Call:
    shape = shapes(draw)
    return "masked_fill.Scalar", (real(*shape), flags(*broadcast(draw, shape)), -2.0), {}


@case("addcmul", "addcdiv", "lerp")
def _ternary(draw: Draw) -> Call:
    shape = shapes(draw)
    target = draw(st.sampled_from(["addcmul.default", "addcdiv.default", "lerp.Tensor"]))
    return target, (real(*shape), real(*broadcast(draw, shape)), real(*broadcast(draw, shape))), {}


@case("dropout")
def _dropout(draw: Draw) -> Call:
    return "dropout.default", (real(*shapes(draw)), 0.0, True), {}


@case("linear")
def _linear(draw: Draw) -> Call:
    *lead, inner, outer = shapes(draw, 2, 4)
    bias = [real(outer)] if draw(st.booleans()) else []
    return "linear.default", (real(*lead, inner), real(outer, inner), *bias), {}


@case("addmm")
def _addmm(draw: Draw) -> Call:
    m, k, n = shapes(draw, 3, 3)
    bias = draw(st.sampled_from([(n,), (1, n), (m, 1), (m, n), (1,), (1, 1)]))
    return "addmm.default", (real(*bias), real(m, k), real(k, n)), {}


@case("matmul")
def _matmul(draw: Draw) -> Call:
    m, k, n, *batch = shapes(draw, 3, 5)
    left, right = broadcast(draw, tuple(batch)), broadcast(draw, tuple(batch))
    return "matmul.default", (real(*left, m, k), real(*right, k, n)), {}


@case("mm", "bmm")
def _bmm(draw: Draw) -> Call:
    m, k, n, b = shapes(draw, 4, 4)
    if draw(st.booleans()):
        return "mm.default", (real(m, k), real(k, n)), {}
    return "bmm.default", (real(b, m, k), real(b, k, n)), {}


@case("layer_norm", "rms_norm")
def _layer_norm(draw: Draw) -> Call:
    shape = shapes(draw, 2)
    whole = list(shape[-draw(st.integers(1, len(shape))) :])
    weights = [real(*whole), real(*whole)] if draw(st.booleans()) else []
    if draw(st.booleans()):
        return "layer_norm.default", (real(*shape), whole, *weights), {}
    return "rms_norm.default", (real(*shape), whole, *weights[:1]), {}


@case("softmax", "log_softmax", "_softmax", "_log_softmax")
def _softmax(draw: Draw) -> Call:
    shape = shapes(draw)
    name = draw(st.sampled_from(["softmax.int", "log_softmax.int", "_softmax.default", "_log_softmax.default"]))
    extra = (False,) if name.startswith("_") else ()
    return name, (real(*shape), dim_of(draw, len(shape)), *extra), {}


@case("sum", "mean")
def _reduce(draw: Draw) -> Call:
    shape = shapes(draw)
    name = draw(st.sampled_from(["sum", "mean"]))
    if draw(st.booleans()):
        return f"{name}.default", (real(*shape),), {}
    dims = sorted(draw(st.sets(st.integers(0, len(shape) - 1))))
    dims = [d - len(shape) if draw(st.booleans()) else d for d in dims]
    keep = draw(st.booleans())
    return f"{name}.{'dim_IntList' if name == 'sum' else 'dim'}", (real(*shape), dims, keep), {}


def _factorise(draw: Draw, n: int) -> list[int]:
    out = []
    while n > 1:
        p = draw(st.sampled_from([d for d in range(2, n + 1) if n % d == 0]))
        out.append(p)
        n //= p
    return out


@case("view", "reshape", "_unsafe_view")
def _view(draw: Draw) -> Call:
    before = shapes(draw)
    after = draw(st.permutations(_factorise(draw, math.prod(before)))) + [1] * draw(st.integers(0, 1))
    after = draw(st.permutations(after))
    name = draw(st.sampled_from(["view.default", "reshape.default", "_unsafe_view.default"]))
    return name, (real(*before), after), {}


@case("flatten")
def _flatten(draw: Draw) -> Call:
    shape = shapes(draw)
    start = draw(st.integers(0, len(shape) - 1))
    return "flatten.using_ints", (real(*shape), start, draw(st.integers(start, len(shape) - 1))), {}


@case("unflatten")
def _unflatten(draw: Draw) -> Call:
    shape = shapes(draw)
    dim = draw(st.integers(0, len(shape) - 1))
    return "unflatten.int", (real(*shape), dim, _factorise(draw, shape[dim]) or [1]), {}


@case("squeeze", "unsqueeze")
def _squeeze(draw: Draw) -> Call:
    shape = shapes(draw)
    dim = dim_of(draw, len(shape))
    choices = [("unsqueeze.default", (real(*shape), dim), {}), ("squeeze.dim", (real(*shape), dim), {})]
    return draw(st.sampled_from([*choices, ("squeeze.default", (real(*shape),), {})]))


@case("transpose", "swapaxes", "movedim", "permute", "t")
def _permute(draw: Draw) -> Call:
    shape = shapes(draw)
    rank = len(shape)
    a, b = dim_of(draw, rank), dim_of(draw, rank)
    order = [d - rank if draw(st.booleans()) else d for d in draw(st.permutations(range(rank)))]
    x = real(*shape)
    calls: list[Call] = [
        ("transpose.int", (x, a, b), {}),
        ("swapaxes.default", (x, a, b), {}),
        ("movedim.int", (x, a, b), {}),
        ("movedim.intlist", (x, order[:2], list(range(rank))[:2]), {}),
        ("permute.default", (x, order), {}),
    ]
    if rank <= 2:
        calls.append(("t.default", (x,), {}))
    return draw(st.sampled_from(calls))


@case("expand")
def _expand(draw: Draw) -> Call:
    shape = shapes(draw)
    return "expand.default", (real(*broadcast(draw, shape)), list(shape)), {}


@case("slice", "narrow", "select")
def _slice(draw: Draw) -> Call:
    shape = shapes(draw)
    dim = dim_of(draw, len(shape))
    start = draw(st.integers(0, shape[dim] - 1))
    end = draw(st.integers(start + 1, shape[dim]))
    x = real(*shape)
    calls: list[Call] = [
        ("slice.Tensor", (x, dim, start, end), {}),
        ("slice.Tensor", (x, dim, start, 2**63 - 1), {}),
        ("slice.Tensor", (x, dim, 0, shape[dim], 2), {}),
        ("narrow.default", (x, dim, start, end - start), {}),
        ("select.int", (x, dim, start), {}),
    ]
    return draw(st.sampled_from(calls))


@case("pad", "constant_pad_nd")
def _pad(draw: Draw) -> Call:
    shape = shapes(draw)
    pads = []
    for n in reversed(shape[-draw(st.integers(1, len(shape))) :]):
        pads += [draw(st.integers(-(n // 2), 2)), draw(st.integers(-((n - 1) // 2), 2))]
    x, value = real(*shape), draw(st.sampled_from([0.0, 2.0]))
    calls: list[Call] = [
        ("pad.default", (x, pads), {}),
        ("pad.default", (x, pads, "constant", value), {}),
        ("constant_pad_nd.default", (x, pads, value), {}),
    ]
    return draw(st.sampled_from(calls))


@case("roll", "flip")
def _roll(draw: Draw) -> Call:
    shape = shapes(draw)
    dim = dim_of(draw, len(shape))
    x = real(*shape)
    calls: list[Call] = [
        ("roll.default", (x, [1], [dim]), {}),
        ("roll.default", (x, [1]), {}),
        ("flip.default", (x, [dim]), {}),
    ]
    return draw(st.sampled_from(calls))


@case("split", "split_with_sizes", "chunk", "unbind")
def _split(draw: Draw) -> Call:
    shape = shapes(draw)
    dim = dim_of(draw, len(shape))
    n = shape[dim]
    x, size = real(*shape), draw(st.integers(1, n))
    calls: list[Call] = [
        ("split.Tensor", (x, size, dim), {}),
        ("split_with_sizes.default", (x, [size, n - size] if size < n else [n], dim), {}),
        ("chunk.default", (x, size, dim), {}),
        ("unbind.int", (x, dim), {}),
    ]
    return draw(st.sampled_from(calls))


@case("cat")
def _cat(draw: Draw) -> Call:
    shape = shapes(draw)
    dim = dim_of(draw, len(shape))
    x, y = real(*shape), real(*shape)
    other = list(shape)
    other[dim] = draw(SIZES)
    return "cat.default", (draw(st.sampled_from([[x, y], [x, x], [x, real(*other)], [x, y, x]])), dim), {}


@case("stack")
def _stack(draw: Draw) -> Call:
    shape = shapes(draw)
    x = real(*shape)
    return "stack.default", (draw(st.sampled_from([[x, real(*shape)], [x, x]])), dim_of(draw, len(shape) + 1)), {}


@case("embedding")
def _embedding(draw: Draw) -> Call:
    ids = torch.randint(0, 5, shapes(draw, 1, 2))
    return "embedding.default", (real(5, draw(SIZES)), ids), {}


@case("cross_entropy_loss")
def _cross_entropy(draw: Draw) -> Call:
    rows, columns = shapes(draw, 2, 2)
    target = torch.randint(0, columns, (rows,))
    target[0] = draw(st.sampled_from([0, -100])) if rows > 1 else 0
    if rows > 1:
        target[1:] = torch.randint(0, columns, (rows - 1,))
    return "cross_entropy_loss.default", (real(rows, columns), target, None, draw(st.integers(0, 2))), {}


@case("mse_loss")
def _mse(draw: Draw) -> Call:
    shape = shapes(draw)
    return "mse_loss.default", (real(*shape), real(*shape), draw(st.integers(0, 2))), {}


@case("scaled_dot_product_attention")
def _attention(draw: Draw) -> Call:
    batch, groups, repeat, rows, columns, channels = (draw(st.sampled_from([1, 2, 4])) for _ in range(6))
    heads, causal = groups * repeat, draw(st.booleans())
    columns = rows if causal else columns
    mask = None
    if not causal and draw(st.booleans()):
        mask = real(*broadcast(draw, (batch, heads, rows, columns))).detach()
        mask = mask if mask.dim() >= 2 else None
    q, k, v = (
        real(batch, heads, rows, channels),
        real(batch, groups, columns, channels),
        real(batch, groups, columns, channels + 1),
    )
    return "scaled_dot_product_attention.default", (q, k, v, mask, 0.0, causal), {"enable_gqa": repeat > 1}


for _name in ("zeros", "ones", "empty", "full", "arange", "scalar_tensor", "eye", "linspace"):

    @case(_name)
    def _factory(draw: Draw, name: str = _name) -> Call:
        n = draw(SIZES)
        args: tuple[Any, ...] = {
            "full": ([n, n], 2.0), "arange": (n,), "scalar_tensor": (2.0,), "eye": (n,), "linspace": (0, 1, n),
        }.get(name, ([n, n],))  # fmt: skip
        return f"{'zeros' if name == 'empty' else name}.default", args, {"dtype": torch.float64}


for _name in ("new_zeros", "new_ones", "new_full", "new_empty"):

    @case(_name)
    def _new(draw: Draw, name: str = _name) -> Call:
        return f"{name}.default".replace("empty", "zeros"), (real(2), [draw(SIZES)], *[1.0] * (name == "new_full")), {}


@case("tril", "triu")
def _triangle(draw: Draw) -> Call:
    return draw(st.sampled_from(["tril.default", "triu.default"])), (real(draw(SIZES), draw(SIZES)),), {}
