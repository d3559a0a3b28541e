# SPDX-License-Identifier: Apache-2.0
"""Prints lines of a passing test."""

from __future__ import annotations

import pytest


def show(config: pytest.Config, text: str) -> None:
    """Write to the terminal, past the capture; in a worker of pytest-xdist to the captured output (``-rP``)."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if reporter is None or capture is None:
        print(text)
        return
    with capture.global_and_fixture_disabled():
        reporter.write_line("")
        reporter.write_line(text)
