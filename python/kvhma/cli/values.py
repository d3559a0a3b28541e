# SPDX-License-Identifier: Apache-2.0
"""Types of options beyond plain numbers: tokens as people write them, ranks, and dtypes."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvhma.cli.engine_options import MAX_RANKS, dtype
from kvhma.cli.hand_off import MAX_TOKENS

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:  # older versions of click are not generic
    ParamType = click.ParamType

_UNITS = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
_BYTES = {None: 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Tokens(ParamType):
    """A number of tokens, as vLLM's ``--max-model-len`` takes it: 8192, 8k (8,000), 8K (8,192) or 1.5k."""

    name = "n"

    def __init__(self, low: int = 1, high: int = MAX_TOKENS) -> None:
        """Accept numbers from `low` to `high`."""
        self.low, self.high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kmKM]?)", value.strip().replace(",", ""), re.ASCII)
        number = Fraction(match[1]) * _UNITS.get(match[2], 1) if match else Fraction(-1)
        if number.denominator != 1 or not self.low <= number <= self.high:
            self.fail(
                f"{value!a}: must be {self.low:,} to {self.high:,}, as 8192, 8k (8,000) or 8K (8,192)", param, ctx
            )
        return int(number)


class GroupTokens(Tokens):
    """A number of tokens for each group: ``8k,8k,0``."""

    name = "n,n,…"

    def __init__(self) -> None:
        """Accept 0, for a group without a hit."""
        super().__init__(0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the numbers."""
        if not isinstance(value, str):
            return value
        return tuple(super(GroupTokens, self).convert(word, param, ctx) for word in value.split(","))


class Speeds(Tokens):
    """Tokens that P and D compute in a second: ``20k/8k``, or one number for both."""

    name = "n[/n]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the numbers of P and of D."""
        if not isinstance(value, str):
            return value
        prefill, _, decode = value.partition("/")
        found = [super(Speeds, self).convert(word, param, ctx) for word in (prefill, decode or prefill)]
        return tuple(found)


class Bytes(ParamType):
    """A number of bytes, as 400GB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,9})([KMGT]B)?", value.strip().upper(), re.ASCII)
        if not match:
            self.fail(f"{value!a}: must be bytes, as 400GB", param, ctx)
        return int(match[1]) * _BYTES[match[2]]


class Engines(ParamType):
    """Numbers of prefill and decode engines, as 4P2D."""

    name = "engines"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return the two numbers."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([1-9]\d{0,3})P([1-9]\d{0,3})D", value.strip().upper(), re.ASCII)
        if not match:
            self.fail(f"{value!a}: must be numbers of engines, as 4P2D", param, ctx)
        return int(match[1]), int(match[2])


class Ranks(ParamType):
    """Ranks, alone and in ranges with both ends: ``0-3,7``."""

    name = "n,n-n,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the ranks, ascending, each once."""
        if not isinstance(value, str):
            return tuple(value)
        found: set[int] = set()
        for word in value.split(","):
            match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", word, re.ASCII)
            if not match or (last := int(match[2] or match[1])) >= MAX_RANKS or last < int(match[1]):
                self._wrong(value, param, ctx)
            found |= set(range(int(match[1]), last + 1))
        return tuple(sorted(found))

    def _wrong(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> NoReturn:
        self.fail(f"{value!a}: must be ranks of 0 to {MAX_RANKS - 1}, as 2 or 0-3,7", param, ctx)


class Dtype(ParamType):
    """A dtype, long or short; None for ``auto``."""

    name = "dtype"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | None:
        """Return its long name."""
        try:
            return dtype(value)
        except ValueError as error:
            self.fail(f"{value!a}: {error}", param, ctx)
