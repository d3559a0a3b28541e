# SPDX-License-Identifier: Apache-2.0
"""Versions of vLLM and NIXL are in order, and pyproject.toml asks for them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

from kvhma import versions
from kvhma.versions import NIXL, NIXL_LEAST, NIXL_STRIDED, VLLM, VLLM_COMPILED, VLLM_DEFAULT, VLLM_READ, series


def test_versions_are_in_order():
    assert sorted(VLLM, key=series) == list(VLLM)
    assert sorted(VLLM_READ, key=series) == list(VLLM_READ)
    assert {series(version) for version in VLLM} <= {series(version) for version in VLLM_READ}
    assert series(NIXL_LEAST) <= series(NIXL_STRIDED) <= series(NIXL)
    assert {VLLM_DEFAULT, *VLLM_COMPILED} <= set(VLLM)
    assert all(series(older) < series(version) for version, older in VLLM_COMPILED.items())


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
