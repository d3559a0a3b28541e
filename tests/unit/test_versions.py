# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml asks for the versions of vLLM and NIXL, and errors name packages that exist."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

from kvhma import versions
from kvhma.versions import NIXL_LEAST, VLLM, series


def test_errors_name_packages_that_exist(monkeypatch):
    """What they print works without a package index that has kvhma."""
    metadata = [
        "numpy>=1.24",
        "click>=8.3 ; extra == 'cli'",
        'rich>=13 ; extra == "cli"',
        "nixl>=1.4 ; extra == 'nixl'",
    ]
    monkeypatch.setattr(versions, "requires", lambda name: metadata)
    assert versions.install_command("cli") == "pip install 'click>=8.3' 'rich>=13'"
    assert versions.install_command("nixl") == "pip install 'nixl>=1.4'"
    assert versions.install_command("router") == "pip install '.[router]' in a checkout of kvhma"

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "requires", absent)
    assert versions.install_command("cli") == "pip install '.[cli]' in a checkout of kvhma"


def test_requirements():
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    first = ".".join(map(str, series(VLLM[0])))
    major, minor = series(VLLM[-1])
    assert f'nixl = ["nixl>={NIXL_LEAST}"]' in pyproject
    assert f'"vllm>={first},<{major}.{minor + 1}"' in pyproject
