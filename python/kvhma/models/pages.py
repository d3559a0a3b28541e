# SPDX-License-Identifier: Apache-2.0
"""The parts of one rank's pages, for attention and recurrent state, in the layout of vLLM's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from kvhma.errors import LayoutError
from kvhma.geometry import Axis, Page, Part, Shard
from kvhma.models.shards import conv_split, shard
from kvhma.models.table import INDEX_KEY, INDEX_SCALE, LATENT_KINDS, Attention, State, item_bytes

ConvOrder: TypeAlias = Literal["DS", "SD"]
"""``DS``: channels, then rows (rows innermost); ``SD``: rows, then channels."""


def state_bytes(state: State, *, tp_size: int = 1) -> int:
    """Return the bytes of one layer's state on one rank, without padding.

    Args:
        state: sizes of the state over all ranks.
        tp_size: tensor-parallel ranks.

    Raises:
        LayoutError: heads or groups do not divide over the ranks.
    """
    return sum(part.nbytes for part in state_parts(state, 0, tp_size, "DS"))


def state_parts(state: State, tp_rank: int, tp_size: int, conv: str) -> tuple[Part, ...]:
    """Return the parts of one state page without gaps: first a convolution, then ``ssm``, as far as the kind has them.

        DS   |x0: r0 r1 r2|x1: r0 r1 r2|..|B0: ..|C0: ..| ssm      offset of a part: its first channel * rows
        SD   |r0: x0 x1 .. B0 .. C0 ..|r1: x0 x1 ..|..  | ssm      offset of a part: its first channel

    Args:
        state: the state over all ranks.
        tp_rank: index among the tensor-parallel ranks.
        tp_size: tensor-parallel ranks.
        conv: order of channels and rows of the convolution state.

    Raises:
        LayoutError: heads or groups do not divide over the ranks.
    """
    channels = conv_split(state, tp_rank=tp_rank, tp_size=tp_size)
    item, rows = item_bytes(state.conv_dtype), state.d_conv - 1 + state.draft_rows
    width = sum(share.held for share in channels.values())
    channel_stride, row_stride = (rows * item, item) if conv == "DS" else (item, width * item)
    parts, first_channel = [], 0
    for name, share in channels.items():
        axes = (
            Axis("channels", share.extent, channel_stride, share.start, share.length),
            Axis("rows", rows, row_stride, spare=state.draft_rows),
        )
        parts.append(Part(name, state.conv_dtype, item, first_channel * channel_stride, axes))
        first_channel += share.held
    if not state.is_recurrent:
        return tuple(parts)
    cell = item_bytes(state.ssm_dtype)
    content = state.head_dim * state.d_state
    heads = shard("state.n_heads", state.n_heads, tp_rank, tp_size)
    axes = (
        Axis("heads", heads.extent, content * cell, heads.start, heads.length),
        Axis("content", content, cell),
    )
    return (*parts, Part("ssm", state.ssm_dtype, cell, width * rows * item, axes))


def attention_page(cache: Attention, tokens: int, strides: Mapping[str, int], held: Shard) -> Page:
    """Return the page of one kernel block.

    Args:
        cache: the cache of a layer over all ranks.
        tokens: tokens of a kernel block.
        strides: bytes from one index to the next of ``H`` heads, ``N`` tokens and, if K and V are separate parts,
            ``S``.
        held: KV heads of the rank.

    Raises:
        LayoutError: the dtype is not known.
    """
    if cache.has_scales:
        return Page(section_parts("uint8", tokens, (INDEX_KEY, INDEX_SCALE)))
    if cache.dtype is None:
        raise LayoutError(f"dtype None of {cache.kind} attention")
    item = item_bytes(cache.dtype)
    token_axis = Axis("tokens", tokens, strides["N"])
    if cache.kind in LATENT_KINDS:
        return Page((Part("kv", cache.dtype, item, 0, (token_axis, Axis("content", cache.head_dim, item))),))
    heads = Axis("heads", held.extent, strides["H"], held.start, held.length)
    if "S" not in strides:
        return Page((Part("kv", cache.dtype, item, 0, (heads, token_axis, Axis("content", cache.items, item))),))
    axes = (heads, token_axis, Axis("content", cache.head_dim, item))
    return Page(tuple(Part(name, cache.dtype, item, index * strides["S"], axes) for index, name in enumerate("kv")))


def section_parts(dtype: str, tokens: int, sizes: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the parts of a kernel block that has the data of all tokens, then all scales.

        | data of token 0 | ... | data of the last | scales of token 0 | ... | scales of the last |
        0                                          offset of "scales"

    Args:
        dtype: of the items.
        tokens: tokens of a kernel block.
        sizes: bytes of a token's data, and of its scales.
    """
    parts, offset = [], 0
    for name, size in zip(("data", "scales"), sizes, strict=True):
        parts.append(Part(name, dtype, 1, offset, (Axis("tokens", tokens, size), Axis("content", size, 1))))
        offset += tokens * size
    return tuple(parts)
