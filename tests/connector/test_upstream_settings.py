# SPDX-License-Identifier: Apache-2.0
"""Our connector reads every setting of upstream's or names it in the log, and a page lists which."""

import re
from pathlib import Path

import pytest
import vllm

from kvhma.versions import NIXL, series
from kvhma.vllm.config.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from-nixl.md").read_text(encoding="utf-8")
UPSTREAM = Path(vllm.__file__).parent / "distributed" / "kv_transfer" / "kv_connector" / "v1" / "nixl"
SETTING = re.compile(r"extra_config(?:\.get)?\(\s*\"(\w+)\"")
METRIC = re.compile(r"name=\"(vllm:nixl_\w+)\"")


LEAST_NIXL = re.compile(r"check_nixl_version\(\"([\d.]+)\"\)")


def read(pattern: re.Pattern[str]) -> set[str]:
    return {name for file in UPSTREAM.rglob("*.py") for name in pattern.findall(file.read_text(encoding="utf-8"))}


def test_every_setting_of_upstream_is_on_the_page():
    found = read(SETTING)
    assert len(found) >= 9
    assert {name for name in found if f"| `{name}`" not in PAGE and f", `{name}` |" not in PAGE} == set()


def test_every_setting_of_upstream_is_taken():
    own = {"backends": ["UCX"], "bidirectional_kv_xfer": True}
    for name in read(SETTING):
        Settings.read({name: own.get(name, 5)})


def test_every_metric_of_upstream_is_on_the_page():
    assert {name for name in read(METRIC) if name not in PAGE} == set()


def test_tests_run_with_a_nixl_that_upstream_takes():
    """Otherwise moving an engine from upstream's connector to ours, or back, needs another package."""
    asked = read(LEAST_NIXL)
    if not asked:
        pytest.skip(f"vLLM {vllm.__version__} asks for no version of NIXL")
    assert max(map(series, asked)) <= series(NIXL)
