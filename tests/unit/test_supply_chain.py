# SPDX-License-Identifier: Apache-2.0
"""What is checked of the packages that kvhma depends on, without a network: `make supply-chain` asks the databases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("lock", ["Cargo.lock", "fuzz/Cargo.lock"])
def test_crates_come_from_crates_io_and_have_a_hash(lock):
    packages = (ROOT / lock).read_text(encoding="utf-8").split("[[package]]")[1:]
    others = [package for package in packages if not re.search(r'^name = "kvhma-', package, re.MULTILINE)]
    assert len(others) > 10
    for package in others:
        assert 'source = "registry+https://github.com/rust-lang/crates.io-index"' in package, package
        assert re.search(r'^checksum = "[0-9a-f]{64}"$', package, re.MULTILINE), package
