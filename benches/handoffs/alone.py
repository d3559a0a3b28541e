# SPDX-License-Identifier: Apache-2.0
"""Engines that run alone: engines that spin while they wait would take the cores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from support.engines import Engine

WIDE: dict[str, Any] = {"hf_overrides": {"num_key_value_heads": 4, "head_dim": 256}, "load_format": "dummy"}
"""Arguments for caches of 16 MiB a layer for 2,001 tokens: copies that take long enough to count."""


@contextlib.contextmanager
def alone(kept: Iterable[Engine], running: Iterable[Engine]) -> Iterator[None]:
    """Stop all running engines except the given ones."""
    names = {id(engine) for engine in kept}
    others = {id(engine): engine for engine in running if id(engine) not in names}
    for engine in others.values():
        engine.pause()
    try:
        yield
    finally:
        for engine in others.values():
            engine.go_on()
