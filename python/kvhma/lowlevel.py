# SPDX-License-Identifier: Apache-2.0
"""Block ids and descriptors in the order of vLLM's own lists, for engines that have such a list already.

A plan needs none of these functions: :meth:`kvhma.Plan.transfer` clips, expands and pairs blocks by itself.
docs/descriptors.md shows the order of the lists.
"""

from __future__ import annotations

from kvhma._kvhma import (
    DescriptorOrder,
    clip_blocks,
    descriptor_ids,
    expand_blocks,
    expand_views,
    fa_descriptors,
    fa_views,
    ssm_descriptors,
    ssm_views,
    window_blocks,
)

__all__ = [
    "DescriptorOrder",
    "clip_blocks",
    "descriptor_ids",
    "expand_blocks",
    "expand_views",
    "fa_descriptors",
    "fa_views",
    "ssm_descriptors",
    "ssm_views",
    "window_blocks",
]
