# SPDX-License-Identifier: Apache-2.0
"""What every byte should be: the label of a token, or of a state, is a hash of the layer and of the whole prefix."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.uint64]

_MASK = (1 << 64) - 1
STATE_ITEMS = 2
"""Labels of a state: more than one, so that a copy of half a state is detected."""


@dataclass(frozen=True)
class GroupShape:
    """One KV cache group of one layer.

    Attributes:
        layer: name of the layer, which is the same at P and D.
        kind: ``full``, ``mla``, ``sliding``, ``sliding_mla``, ``chunked`` or ``state``.
        block_size: tokens of a block.
        reach: the window or the chunk in tokens.
    """

    layer: str
    kind: str
    block_size: int
    reach: int = 0

    @property
    def items(self) -> int:
        """Labels of a page."""
        return STATE_ITEMS if self.kind == "state" else self.block_size

    def first_seen(self, position: int) -> int:
        """First token that the query at a position attends to."""
        if self.kind in ("sliding", "sliding_mla"):
            return max(0, position - self.reach + 1)
        if self.kind == "chunked":
            return position // self.reach * self.reach
        return 0


class Text:
    """Tokens and the hashes of their prefixes; `hashes[t]` stands for the tokens up to and including `t`."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self.hashes: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        value = self.hashes[-1] if self.hashes else 0x9E3779B97F4A7C15
        for token in tokens:
            value = ((value ^ token) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
            value ^= value >> 31
            self.tokens.append(token)
            self.hashes.append(value)

    def __len__(self) -> int:
        return len(self.tokens)

    def labels(self, group: GroupShape, start: int, stop: int) -> Labels:
        """Labels of tokens of an attention group."""
        return np.array(self.hashes[start:stop], np.uint64) ^ salt(group.layer)

    def state(self, group: GroupShape, tokens: int) -> Labels:
        """Labels of the state after some tokens."""
        return state_labels(group, self.hashes[tokens - 1])


def state_labels(group: GroupShape, prefix: int) -> Labels:
    return (np.uint64(prefix) ^ salt(group.layer)) + np.arange(STATE_ITEMS, dtype=np.uint64)


_SALTS: dict[str, np.uint64] = {}


def salt(layer: str) -> np.uint64:
    """A number for each layer."""
    found = _SALTS.get(layer)
    if found is None:
        name = layer.encode()
        found = _SALTS[layer] = np.uint64(zlib.crc32(name) << 32 | zlib.crc32(name[::-1] + b"?"))
    return found
