"""What importing autoplan drags in."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autoplan

ROOT = Path(__file__).parents[2]
TORCH_FREE = ("errors", "ir", "hardware", "rules", "planner", "display", "cli")


def _run(code: str) -> str:
    prefix = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'solver')!r}]\n"
    done = subprocess.run([sys.executable, "-c", prefix + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_autoplan_imports_nothing_heavy() -> None:
    assert _run("import autoplan; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])") == "[]"


@pytest.mark.parametrize("room", TORCH_FREE)
def test_room_imports_without_torch(room: str) -> None:
    """All modules of a room that only decides can be imported without importing torch."""
    if importlib.util.find_spec(f"autoplan.{room}") is None:
        pytest.skip(f"autoplan.{room} does not exist yet")
    code = f"""
import importlib, pkgutil
room = importlib.import_module("autoplan.{room}")
for module in pkgutil.walk_packages(getattr(room, "__path__", ()), "autoplan.{room}."):
    importlib.import_module(module.name)
print([m for m in ("torch", "transformers") if m in sys.modules])
"""
    assert _run(code) == "[]"


def test_help_starts_without_torch() -> None:
    if importlib.util.find_spec("autoplan.cli") is None:
        pytest.skip("autoplan.cli does not exist yet")
    code = """
sys.argv = ["autoplan", "--help"]
from autoplan.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("torch" in sys.modules)
"""
    out = _run(code)
    assert "Usage" in out
    assert out.endswith("False")


def test_public_names_are_listed_and_unknown_ones_rejected() -> None:
    assert set(autoplan.__all__) <= set(dir(autoplan))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = autoplan.nothing


@pytest.mark.parametrize("name", [n for n in autoplan.__all__ if n != "__version__"])
def test_public_name_loads_from_its_home(name: str) -> None:
    home = autoplan._HOMES[name]
    try:
        missing = importlib.util.find_spec(home) is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        pytest.skip(f"{home} does not exist yet")
    assert getattr(autoplan, name).__name__ == name


def test_version_is_that_of_the_distribution() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{autoplan._FALLBACK_VERSION}"' in text
    assert autoplan.__version__ == autoplan._version()


PRIVATE = re.compile(
    r"torch\._\w|_c10d_functional|[\w)\]]\._(version|codegen|cdata|parameters|buffers|modules|local_tensor)\b"
)


def test_private_torch_interfaces_stay_in_compat_files() -> None:
    """Attributes and modules of torch that are not public are named in `compat.py` files only, or on lines of prose."""
    found = []
    for path in sorted((ROOT / "autoplan").rglob("*.py")):
        tree = ast.parse(path.read_text())
        if path.name == "compat.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom):
                code = ast.unparse(node)
                own = isinstance(node, ast.Attribute) and code.startswith("self.")
                if PRIVATE.search(code) and not own and "__version__" not in code:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {code}")
    assert not found, "\n".join(found)
