"""`OpGraph`: the torch-free picture of one forward computation that every other room reads.

Values are named; an op reads and writes values. Composite ops stay whole (``aten.linear.default``), multi-output ops
list all their outputs, and aliases such as ``getitem`` do not occur. Ops stand in program order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from autoplan.errors import AutoplanError
from autoplan.ir.tensor import TensorSpec

FORMAT = 1


@dataclass(frozen=True)
class Ref:
    """Use of a value as an argument."""

    value: str

    def __str__(self) -> str:
        return f"%{self.value}"


Arg = Ref | int | float | bool | str | None | tuple["Arg", ...]
InputKind = Literal["parameter", "buffer", "input"]


@dataclass(frozen=True)
class GraphInput:
    """A value that the graph is given.

    Attributes:
        value: Its name in the graph.
        kind: Parameter or buffer of the model, or input of the step.
        path: Qualified name of the parameter or buffer; for inputs the argument name (``input_ids``), dotted where
            it is nested.
        aliases: Further qualified names of a tied parameter.
    """

    value: str
    kind: InputKind
    path: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        key: Stable name: module path, op and ordinal within the module, ``h.0.attn:aten.linear#1``.
        target: Overload name, ``aten.linear.default``.
        args: Positional arguments; tensors as `Ref`, dtypes and layouts as strings.
        kwargs: Keyword arguments likewise.
        outputs: Values it produces.
        module: Path of the innermost module it ran in, ``""`` for the root.
        source: ``file.py:12 in forward: the line``, empty where unknown.
    """

    key: str
    target: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    outputs: tuple[str, ...]
    module: str = ""
    source: str = ""

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Distinct values read, in order of first use in args, then kwargs."""
        return tuple(dict.fromkeys(_refs((self.args, tuple(self.kwargs.values())))))

    @property
    def name(self) -> str:
        """Op without name space and overload: ``linear``."""
        parts = self.target.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    def arg(self, position: int, keyword: str, default: Arg = None) -> Arg:
        """Argument given by position or by keyword, else `default`."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(keyword, default)

    def __str__(self) -> str:
        args = ", ".join([*map(_text, self.args), *(f"{k}={_text(v)}" for k, v in self.kwargs.items())])
        return f"{', '.join('%' + o for o in self.outputs)} = {self.target}({args})"


@dataclass(frozen=True)
class OpGraph:
    """A whole forward graph.

    Attributes:
        inputs: Parameters, buffers and step inputs, in the order in which programs take them.
        ops: Operations in program order.
        values: Every value's spec.
        outputs: Values returned, flattened.
        loss: Index into `outputs` of the scalar loss, or None.
        name: Of the model, for people.
    """

    inputs: tuple[GraphInput, ...]
    ops: tuple[Op, ...]
    values: Mapping[str, TensorSpec]
    outputs: tuple[str, ...]
    loss: int | None = None
    name: str = "model"

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """Op that makes a value (inputs have none)."""
        return {v: op for op in self.ops for v in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Op, ...]]:
        """Ops that read each value, in program order."""
        out: dict[str, list[Op]] = {v: [] for v in self.values}
        for op in self.ops:
            for v in op.inputs:
                out[v].append(op)
        return {v: tuple(ops) for v, ops in out.items()}

    @cached_property
    def input_of(self) -> Mapping[str, GraphInput]:
        """Graph input behind a value name."""
        return {i.value: i for i in self.inputs}

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over everything that a plan depends on (not over source lines)."""
        data = self.to_json()
        for op in data["ops"]:
            op.pop("source", None)
        data.pop("name")
        return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=8).hexdigest()

    def verify(self) -> OpGraph:
        """Checks that every value is defined once, before its use, and keys are unique; returns itself.

        Raises:
            AutoplanError: Names the first op that breaks this.
        """
        known = {i.value for i in self.inputs}
        keys: set[str] = set()
        for op in self.ops:
            missing = [v for v in op.inputs if v not in known]
            if missing or op.key in keys or any(o in known for o in op.outputs):
                raise AutoplanError(f"graph {self.name}: op {op.key} ({op}) uses {missing or 'a repeated name'}")
            keys.add(op.key)
            known.update(op.outputs)
        lost = [v for v in (*known, *self.outputs) if v not in self.values or v not in known]
        if lost:
            raise AutoplanError(f"graph {self.name}: no spec or no producer for {lost[:3]}")
        return self

    def to_json(self) -> dict[str, Any]:
        """Versioned JSON."""
        return {
            "format": FORMAT,
            "name": self.name,
            "inputs": [[i.value, i.kind, i.path, list(i.aliases)] for i in self.inputs],
            "ops": [
                {
                    "key": op.key,
                    "target": op.target,
                    "args": [_arg_json(a) for a in op.args],
                    "kwargs": {k: _arg_json(a) for k, a in op.kwargs.items()},
                    "outputs": list(op.outputs),
                    "module": op.module,
                    "source": op.source,
                }
                for op in self.ops
            ],
            "values": {v: s.to_json() for v, s in self.values.items()},
            "outputs": list(self.outputs),
            "loss": self.loss,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OpGraph:
        """Inverse of `to_json`.

        Raises:
            AutoplanError: Another format version.
        """
        if data.get("format") != FORMAT:
            raise AutoplanError(f"graph format {data.get('format')!r} is not {FORMAT}")
        return cls(
            inputs=tuple(GraphInput(v, k, p, tuple(a)) for v, k, p, a in data["inputs"]),
            ops=tuple(
                Op(
                    o["key"],
                    o["target"],
                    tuple(_arg_from(a) for a in o["args"]),
                    {k: _arg_from(a) for k, a in o["kwargs"].items()},
                    tuple(o["outputs"]),
                    o["module"],
                    o["source"],
                )
                for o in data["ops"]
            ),
            values={v: TensorSpec.from_json(s) for v, s in data["values"].items()},
            outputs=tuple(data["outputs"]),
            loss=data["loss"],
            name=data["name"],
        ).verify()

    def __str__(self) -> str:
        lines = [f"{i.kind} %{i.value}: {self.values[i.value]}  # {i.path}" for i in self.inputs]
        lines += [f"{op}  # {', '.join(str(self.values[o]) for o in op.outputs)}  {op.key}" for op in self.ops]
        return "\n".join([*lines, f"return {', '.join('%' + o for o in self.outputs)}"])


def _refs(arg: Arg) -> Iterator[str]:
    if isinstance(arg, Ref):
        yield arg.value
    elif isinstance(arg, tuple):
        for a in arg:
            yield from _refs(a)


def _text(arg: Arg) -> str:
    if isinstance(arg, tuple):
        return "[" + ", ".join(map(_text, arg)) + "]"
    return str(arg)


def _arg_json(arg: Arg) -> Any:
    if isinstance(arg, Ref):
        return {"%": arg.value}
    if isinstance(arg, tuple):
        return [_arg_json(a) for a in arg]
    if isinstance(arg, float) and not (float("-inf") < arg < float("inf")):
        return {"float": repr(arg)}
    return arg


def _arg_from(data: Any) -> Arg:
    if isinstance(data, dict):
        return Ref(data["%"]) if "%" in data else float(data["float"])
    if isinstance(data, list):
        return tuple(_arg_from(a) for a in data)
    value: Arg = data
    return value
