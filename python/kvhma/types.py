# SPDX-License-Identifier: Apache-2.0
"""Types that several modules and the stubs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IdsLike: TypeAlias = "Sequence[int] | NDArray[np.integer]"
"""Block ids: a list of int, or an array of integers of shape ``(n,)``; an empty array may have any type."""

U64s: TypeAlias = "Sequence[int] | NDArray[np.integer]"
"""Addresses, sizes or counts: a list of int, or an array of integers of shape ``(n,)``."""
