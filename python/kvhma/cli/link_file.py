# SPDX-License-Identifier: Apache-2.0
"""The file in which ``kvhma bench link`` stores the speed of a link, and where other commands look for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from kvhma.costs import DEFAULT_LINK, Link
from kvhma.errors import RequestError
from kvhma.models.config import load_json


def link_file() -> Path:
    """Return where ``kvhma bench link`` writes its result and ``kvhma plan`` looks for it."""
    return Path(click.get_app_dir("kvhma")) / "link.json"


def save_link(link: Link, path: Path) -> None:
    """Write the constants.

    Raises:
        RequestError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(link.to_json(), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from error


def load_link(path: Path | None) -> Link:
    """Read the constants from a file, else from the usual place, else return the defaults.

    Raises:
        ConfigError: the file cannot be read, or is not JSON.
        RequestError: the JSON was not written by `kvhma bench link`.
    """
    if path is None:
        path = link_file()
        if not path.is_file():
            return DEFAULT_LINK
    form = load_json(path)
    try:
        link = Link.from_form(form)
    except RequestError as error:
        raise RequestError(f"{path}: {error}", code=error.code, field=error.field, value=error.value) from error
    return replace(link, source=f"{link.source} ({path})")
