# SPDX-License-Identifier: Apache-2.0
"""The table of limits in docs/descriptors.md is what the tool measures here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/descriptors.md").read_text()

pytestmark = pytest.mark.nixl


def rows(*names: str) -> list[str]:
    """Run the tool; without the two lines above its rows."""
    tool = [sys.executable, ROOT / "tools/transport_limits.py", *names]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.splitlines()[2:]


def test_rows_of_the_page() -> None:
    """The other transports take longer, or need what is not installed."""
    measured = rows("POSIX", "UCX, TCP")
    assert len(measured) == 2
    assert set(measured) <= set(PAGE.splitlines())


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is not None, reason="Mooncake is installed")
def test_a_transport_that_is_not_installed_has_a_row() -> None:
    assert rows("Mooncake, TCP") == ["| Mooncake, TCP | not measured: No module named 'mooncake' | | |"]
