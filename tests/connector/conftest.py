# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests of the connector."""

import functools

import pytest

from kvhma import plan
from kvhma.nixl import Agent


@pytest.fixture(autouse=True)
def no_prewarming(monkeypatch):
    """Engines on loopback prewarm their transport, which takes longer than most tests of many workers."""
    monkeypatch.setattr(Agent, "prewarm_transport", lambda self: None)


@pytest.fixture
def exact_plans(monkeypatch):
    """D moves no byte after a last token."""
    monkeypatch.setattr("kvhma.vllm.peers.prefill_engines.make_plan", functools.partial(plan, descriptor_bytes=0))
