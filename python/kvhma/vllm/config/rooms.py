# SPDX-License-Identifier: Apache-2.0
"""Which options an engine has. The folder of an option may be absent: only who asks for that option notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from kvhma.errors import SettingsError

_OPTIONS = "kvhma.vllm.options"

WITHOUT_SETTING = ("tickets",)
"""Options that requests ask for: each engine has those whose folders are there."""

ASKED_BY_KEY = {"kvhma_ticket": "tickets"}
"""The options that a request asks for by a key of its ``kv_transfer_params``."""


def find_rooms(part: str, options: Sequence[str]) -> Iterator[Any]:
    """Yield the doors of the options that are installed, see :mod:`kvhma.vllm.options.doors`.

    Args:
        part: ``scheduler`` or ``worker``.
        options: names of their folders.
    """
    for option in options:
        name = f"{_OPTIONS}.{option}.{part}"
        try:
            yield import_module(name).Room
        except ModuleNotFoundError as error:
            if error.name not in (name, f"{_OPTIONS}.{option}"):
                raise


def check_installed(option: str, asked_by: str) -> None:
    """Refuse to start an engine that needs an option whose folder is absent.

    Raises:
        SettingsError: the text names what needs the option.
    """
    try:
        import_module(f"{_OPTIONS}.{option}")
    except ModuleNotFoundError as error:
        if error.name != f"{_OPTIONS}.{option}":
            raise
        raise SettingsError(f"{asked_by}, but kvhma was installed without the option {option!r}") from None
