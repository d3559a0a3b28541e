# SPDX-License-Identifier: Apache-2.0
"""Defaults of transformers' configuration classes for missing fields; ``tools/config_defaults.py`` records them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

_NO_DEFAULTS = frozenset({"text", "layer_types", "lacks"})


@cache
def _recorded() -> Mapping[str, Mapping[str, Any]]:
    found = json.loads(files("kvhma").joinpath("data/config_defaults.json").read_text("utf-8"))
    return {kind: fields for kind, fields in found.items() if isinstance(fields, dict)}


def defaults_of(kind: str) -> Mapping[str, Any]:
    """Return the values of fields that a file of this ``model_type`` may leave out; empty if unknown."""
    return {name: value for name, value in _recorded().get(kind, {}).items() if name not in _NO_DEFAULTS}


def text_type(kind: str) -> str | None:
    """Return the type of the language model inside a multimodal type; None if unknown."""
    found = _recorded().get(kind, {}).get("text")
    return None if found is None else str(found)


def derives_layers(kind: str) -> bool:
    """Return whether the class of this type lists the kinds of layers if a file does not."""
    return "layer_types" in _recorded().get(kind, {})


def lacks(kind: str, field: str) -> bool:
    """Return whether the class of this type lacks a field, or no class is known."""
    found = _recorded().get(kind)
    return found is None or field in found.get("lacks", ())


def is_known(kind: str) -> bool:
    """Return whether transformers has a class of this type."""
    return kind in _recorded()


def known_types() -> tuple[str, ...]:
    """Return every recorded ``model_type``."""
    return tuple(_recorded())
