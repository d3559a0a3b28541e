# SPDX-License-Identifier: Apache-2.0
"""The share of a model's heads and channels that one tensor-parallel rank holds."""

from __future__ import annotations

from kvhma.errors import LayoutError
from kvhma.geometry import Shard
from kvhma.models.table import LATENT_KINDS, Attention, State


def check_positive(**sizes: int) -> None:
    """Refuse sizes below 1.

    Args:
        **sizes: by name.

    Raises:
        LayoutError: the text names the size and its value.
    """
    for name, value in sizes.items():
        if value < 1:
            raise LayoutError(f"{name} {value}: must be at least 1")


def shard(field: str, extent: int, tp_rank: int, tp_size: int, *, may_repeat: bool = False) -> Shard:
    """Return the items of one rank; with `may_repeat` ranks that outnumber the items hold one each.

        extent 8, 4 ranks        |0 1|2 3|4 5|6 7|
        extent 2, 4 ranks        |0|0|1|1|           may_repeat

    Args:
        field: name of the divided items, for the error.
        extent: items over all ranks.
        tp_rank: the rank.
        tp_size: tensor-parallel ranks.
        may_repeat: ranks that outnumber the items hold one each.

    Raises:
        LayoutError: the items do not divide over the ranks.
    """
    check_positive(tp_size=tp_size)
    if extent % tp_size == 0:
        return Shard(extent, tp_rank * (extent // tp_size), extent // tp_size)
    if may_repeat and tp_size % extent == 0:
        return Shard(extent, tp_rank * extent // tp_size, 1)
    raise LayoutError(f"tp_size {tp_size}: {field} {extent} cannot be shared out evenly")


def kv_heads(cache: Attention, tp_rank: int, tp_size: int) -> Shard:
    """Return a rank's KV heads; every rank holds the single vector of a latent.

    Args:
        cache: heads of the layer.
        tp_rank: the rank.
        tp_size: tensor-parallel ranks.

    Raises:
        LayoutError: heads do not divide over the ranks.
    """
    check_positive(tp_size=tp_size)
    if cache.kind in LATENT_KINDS:
        return Shard(1, 0, 1)
    return shard("kv_heads", cache.kv_heads, tp_rank, tp_size, may_repeat=True)


def conv_split(state: State, *, tp_rank: int = 0, tp_size: int = 1) -> dict[str, Shard]:
    """Return a rank's channels of every part of the convolution state, by name, in memory order.

    ``x`` and ``v`` follow the heads. ``B`` and ``C`` follow the groups: they are split if `tp_size` divides the groups,
    and every rank holds a single group whole. Key heads of GDN and KDA are always split.

    Args:
        state: sizes of the state over all ranks.
        tp_rank: the rank.
        tp_size: tensor-parallel ranks.

    Raises:
        LayoutError: heads or groups do not divide over the ranks; vLLM does not start such an engine.
    """
    channels = {}
    for name, extent in state.conv_parts:
        if name in ("x", "v"):
            items = shard("state.n_heads", state.n_heads, tp_rank, tp_size)
        else:
            repeats = state.kind == "mamba2" and state.n_groups == 1
            items = shard("state.n_groups", state.n_groups, tp_rank, tp_size, may_repeat=repeats)
        width = extent // items.extent
        channels[name] = Shard(extent, items.start * width, items.held * width)
    return channels
