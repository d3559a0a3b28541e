# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests of the connector."""

import pytest

from kvhma.nixl import Agent


@pytest.fixture(autouse=True)
def no_prewarming(monkeypatch):
    """Engines on loopback prewarm their transport, which takes longer than most tests of many workers."""
    monkeypatch.setattr(Agent, "prewarm_transport", lambda self: None)
