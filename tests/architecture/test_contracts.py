"""The import contracts of pyproject.toml hold, and the packaging files say the same thing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _names(requirements: list[str]) -> set[str]:
    return {_normal(re.split(r"[<>=!~\[; ]", text, maxsplit=1)[0]) for text in requirements}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = ['.', 'solver']; {code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._]+", line) for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = _names(project["dependencies"]).union(*map(_names, project["optional-dependencies"].values()))
    assert wanted <= _names(lines)


def test_readme_holds_the_commands_that_ci_runs() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in ('".[demo]" && autoplan demo', '".[test]" && python -m pytest'):
        line = f"pip install -c constraints.txt -e {command}"
        assert f"```bash\n{line}\n```" in readme
        assert line in ci
