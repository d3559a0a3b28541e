# SPDX-License-Identifier: Apache-2.0
"""Types that several modules and the stubs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

IdsLike: TypeAlias = "Sequence[int] | NDArray[np.integer]"
"""Block ids: a list of int, or an array of integers of shape ``(n,)``; an empty array may have any type."""

U64s: TypeAlias = "Sequence[int] | NDArray[np.integer]"
"""Addresses, sizes or counts: a list of int, or an array of integers of shape ``(n,)``."""


class Span(NamedTuple):
    """A request's live blocks in one group.

    Attributes:
        first: index of ``ids[0]`` in the request's block table. Without context parallelism this is the absolute block
            position in the sequence: block ``first + i`` starts at token ``(first + i) * block_size``. With context
            parallelism it starts at ``(first + i) * block_size * cp_size``. Ignored for ``ssm`` groups, whose last
            state counts.
        ids: logical block ids, in the order of the sequence: a list of int, or an array of integers of shape ``(n,)``.
            Never the null block.
    """

    first: int
    ids: IdsLike
