"""Emitted graphs as text that people read: valid Python with shapes and module paths beside it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autoplan.codegen.program import Note, value_of

_ASSIGNED = re.compile(r"\s+(\w+)(?::[^=]*)? = ")
_SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32"}
_COLUMN = 96


def readable(gm: fx.GraphModule, title: str = "") -> str:
    """Code of a graph module, with a header, a comment where the module changes, and the type of every result.

    The text compiles, holds no paths or addresses of this machine, and is the same for the same program.
    """
    code = gm.graph.python_code("self")
    nodes = {n.name: n for n in gm.graph.nodes}
    lines = [f"# {line}" for line in title.splitlines()] + [*_imports(code.globals, code.src), ""]
    section: str | None = None
    for line in code.src.strip("\n").splitlines():
        match = _ASSIGNED.match(line)
        node = nodes.get(match.group(1)) if match else None
        if node is None:
            lines.append(line.rstrip())
            continue
        note = Note.read(node)
        module = section if note is None else note.module
        if module != section:
            section = module
            lines.append(f"    # {module or '(root)'}")
        comment = _comment(node, note)
        lines.append(f"{line.rstrip():<{_COLUMN}}  # {comment}" if comment else line.rstrip())
    return "\n".join(lines) + "\n"


def _comment(node: fx.Node, note: Note | None) -> str:
    parts = [_type(value_of(node))]
    if note is not None:
        if note.role != "op":
            parts.append(note.role)
        parts.append(note.op.rpartition(":")[2] or note.op)
    return "  ".join(p for p in parts if p)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return f"{_SHORT.get(name, name)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_type(v) for v in value if v is not None) + ")"
    return ""


def _imports(names: dict[str, Any], source: str) -> Iterator[str]:
    """Import lines for the globals that fx code refers to."""
    yield "import torch"
    for name, value in sorted(names.items()):
        if name == "torch" or not re.search(rf"\b{name}\b", source):
            continue
        if inspect.ismodule(value):
            yield f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
        elif isinstance(value, float):
            yield f"{name} = float({str(value)!r})"
        elif value is None or value is type(None):
            yield f"{name} = type(None)" if value is not None else f"{name} = None"
        elif hasattr(value, "__module__") and hasattr(value, "__name__"):
            own = value.__name__
            yield f"from {value.__module__} import {own}" + (f" as {name}" if own != name else "")
