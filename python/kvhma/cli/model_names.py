# SPDX-License-Identifier: Apache-2.0
"""Resolves MODEL: a file, a directory, or a built-in model by one of its names."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from kvhma.errors import GeometryError, KvhmaError, UnknownModelError
from kvhma.geometry import Geometry
from kvhma.models import Model, hub_ids, model, models


def find_model(name: str) -> Model:
    """Return a built-in model.

    Raises:
        UnknownModelError: no such model; the text names the most similar model, and what to do for another one.
    """
    try:
        return model(name)
    except UnknownModelError:
        known = {known.lower(): known for known in (*models(), *hub_ids())}
        known |= {hub_id.rpartition("/")[2].lower(): hub_id for hub_id in hub_ids()}
        near = get_close_matches(name.lower()[:200], known, 1, 0.7) or get_close_matches(
            name.rpartition("/")[2].lower()[:200], known, 1, 0.7
        )
        mean = f" Did you mean {known[near[0]]}?" if near else ""
        source = name if re.fullmatch(r"[\w.-]{1,100}/[\w.-]{1,100}", name, re.ASCII) else "ORGANISATION/NAME"
        raise UnknownModelError(
            f"MODEL {name!a}: no such file or directory, and no built-in model (`kvhma models` lists them).{mean} "
            f"Any other model needs its config.json: hf download {source} config.json --local-dir DIR, and DIR as MODEL"
        ) from None


def is_there(text: str) -> bool:
    """Return whether MODEL names a file or a directory."""
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or with a null character
        return False


def geometry(path: Path) -> Geometry:
    """Read a geometry from a file.

    Raises:
        KvhmaError: the file is not a geometry; the text starts with its path.
    """
    try:
        return parse_geometry(path.read_bytes(), str(path))
    except OSError as error:
        raise GeometryError(f"{path}: {error.strerror or error}") from error


def parse_geometry(raw: bytes, name: str) -> Geometry:
    """Parse a geometry; `name` is its source.

    Raises:
        KvhmaError: it is not a geometry; the text starts with its source.
    """
    try:
        return Geometry.from_json(raw)
    except KvhmaError as error:
        raise type(error)(f"{name}: {error}") from error


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete MODEL from the built-in models, in upper or lower case, else from files."""
    names = (name for name in (*models(), *hub_ids()) if name.lower().startswith(incomplete.lower()))
    return [CompletionItem(name) for name in dict.fromkeys(names)] or [CompletionItem(incomplete, type="file")]
