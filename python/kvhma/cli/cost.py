# SPDX-License-Identifier: Apache-2.0
"""The cost of a read: ``seconds = seconds_per_descriptor * descriptors + bytes / bytes_per_second``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from kvhma.errors import RequestError
from kvhma.models.config import load_json

LINK_VERSION = 1


@dataclass(frozen=True, slots=True)
class Link:
    """Expected speed of the link between two engines, for one reader.

    Attributes:
        seconds_per_descriptor: time that an additional descriptor takes.
        bytes_per_second: bandwidth with few descriptors.
        source: where the two numbers come from.
    """

    seconds_per_descriptor: float
    bytes_per_second: float
    source: str

    def seconds(self, descriptors: int, nbytes: int) -> float:
        """Return the time that one rank's reads take, one after the other."""
        return self.seconds_per_descriptor * descriptors + nbytes / self.bytes_per_second


DEFAULT_LINK = Link(3e-6, 40e9, "defaults: 3 µs a descriptor, 40 GB/s; measure yours with `kvhma bench link`")
"""Roughly the speed of a 400 Gb/s network card."""


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
        path.write_text(json.dumps({"kvhma_link": LINK_VERSION, **asdict(link)}, indent=1) + "\n", encoding="utf-8")
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
    if form.get("kvhma_link") != LINK_VERSION:
        raise RequestError(f"{path}: not written by `kvhma bench link` (version {LINK_VERSION})")
    numbers = []
    for name in ("seconds_per_descriptor", "bytes_per_second"):
        value = form.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise RequestError(f"{path}: {name} {value!a}: must be a positive number")
        numbers.append(float(value))
    return Link(numbers[0], numbers[1], f"measured, {path}")
