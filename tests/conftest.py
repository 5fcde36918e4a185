"""What all tests share: golden files, and hypothesis without time limits."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("autoplan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("autoplan")  # no test depends on how busy the machine is

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files under tests/golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with tests/golden/NAME, or rewrites that file under --update-golden."""

    def check(text: str, name: str) -> None:
        path = GOLDEN / name
        text = text if text.endswith("\n") else text + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"tests/golden/{name} does not exist; run pytest --update-golden and read what it wrote")
        diff = difflib.unified_diff(
            path.read_text().splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
        )
        lines = list(diff)
        if lines:
            pytest.fail("differs from the golden file (pytest --update-golden rewrites it):\n" + "\n".join(lines))

    return check
