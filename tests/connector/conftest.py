# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests of the connector."""

import functools
import logging
import re

import pytest

from kvhma import plan
from kvhma.nixl import Agent

WITHOUT_VLLM = re.compile(
    "test_(devices|lease_protocol|lease_table|leases|memory|notifications|params|peers|plugin|prefill_engines|routers|"
    r"scale|settings|standstill|threads|wire_formats)\.py"
)
"""Files of tests that need no vLLM."""


class NeedsVllm(pytest.Module):
    """Tests that are skipped where vLLM is not installed."""

    def collect(self):
        # With its parts, since torch warns while they are imported, and a warning is an error here.
        pytest.importorskip(
            "vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it"
        )
        return super().collect()


def pytest_pycollect_makemodule(module_path, parent):
    needs_none = WITHOUT_VLLM.fullmatch(module_path.name)
    return None if needs_none else NeedsVllm.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def no_prewarming(monkeypatch):
    """Engines on loopback prewarm their transport, which takes longer than most tests of many workers."""
    monkeypatch.setattr(Agent, "prewarm_transport", lambda self: None)


@pytest.fixture(autouse=True)
def every_line():
    """Lines of earlier tests leave none of a test's out of the log."""
    for sparing in logging.getLogger("vllm.kvhma.peers").filters:
        sparing._kinds.clear()


@pytest.fixture
def exact_plans(monkeypatch):
    """D moves no byte after a last token."""
    monkeypatch.setattr("kvhma.vllm.peers.prefill_engines.make_plan", functools.partial(plan, descriptor_bytes=0))
