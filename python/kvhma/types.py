# SPDX-License-Identifier: Apache-2.0
"""Types that several modules and the stubs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IdsLike: TypeAlias = "Sequence[int] | NDArray[np.int32] | NDArray[np.int64]"
"""Block ids: a list of int, or a C-contiguous int32 or int64 array of shape ``(n,)``."""

U64s: TypeAlias = "Sequence[int] | NDArray[np.uint64]"
"""Addresses, sizes or counts: a list of int, or a C-contiguous uint64 array of shape ``(n,)``."""
