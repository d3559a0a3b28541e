# SPDX-License-Identifier: Apache-2.0
"""The functions that are being called: vLLM gives connectors neither its loop nor its model, but they have them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any


def caller_variables() -> Iterator[dict[str, Any]]:
    """Yield the variables of each function that is being called, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back
