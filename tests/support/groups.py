# SPDX-License-Identifier: Apache-2.0
"""The groups that the package makes of a model, in the form that tests compare."""

from __future__ import annotations

from dataclasses import dataclass

from kvhma.models import Attention, CacheKind, Model
from kvhma.models.block_size import token_bytes
from kvhma.models.grouping import group_layers, layer_specs
from kvhma.models.stride_orders import Order


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table. Where all pages have one size the j-th of them uses tensor j.

    Attributes:
        kind: what its layers cache; where they are of several kinds, that of the first.
        layers: their names; never more than there are tensors.
        block_size: tokens of a block.
        pages: bytes of a page of each layer, padding included.
    """

    kind: CacheKind
    layers: tuple[str, ...]
    block_size: int
    pages: tuple[int, ...]


def cache_groups(
    model: Model, *, tp_size: int = 1, block_size: int = 16, align: int | None = None, order: Order = "LBHNC"
) -> tuple[CacheGroup, ...]:
    """Divide a model's layers into groups; `order` decides whether all layers of a block are next to each other."""
    found = []
    specs = layer_specs(model, tp_size=tp_size, block_size=block_size, align=align)
    for group in group_layers(specs, block_major=order[0] == "B"):
        first = next(iter(group.values()))
        found.append(CacheGroup(first.kind, tuple(group), first.block_size, tuple(y.page for y in group.values())))
    return tuple(found)


def kv_bytes(model: Model, *, tp_size: int = 1) -> int:
    """Bytes of one token on one rank in the attention layer that has the most; 0 without attention."""
    caches = [cache for _, cache in model.specs if isinstance(cache, Attention)]
    return max((token_bytes(cache, tp_size=tp_size) for cache in caches), default=0)
