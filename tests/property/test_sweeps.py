# SPDX-License-Identifier: Apache-2.0
"""The sweeps of vLLM's geometry tests: blocks and kernel blocks of other sizes, latents beside states, by byte."""

from __future__ import annotations

import pytest

import kvhma
from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.oracle import Oracle
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES

ITEMS = 3
CHANNELS, ROWS, STATE_HEADS, STATE = 8, 3, 4, 4


def latent_hybrid(base: int, block: int, kernel: int, blocks: int, tp_rank: int = 0, tp_size: int = 1) -> Geometry:
    """Latent attention and two groups of gated-delta-net state over two shared tensors, as upstream's worker has."""
    axes = (Axis("tokens", kernel, 2 * ITEMS), Axis("content", ITEMS, 2))
    attention = Page((Part("kv", "float16", 2, 0, axes),))
    channels, heads = CHANNELS // tp_size, max(1, STATE_HEADS // tp_size)
    lead = Axis("channels", CHANNELS, 2 * ROWS, tp_rank * channels, channels)
    first = tp_rank * STATE_HEADS // tp_size
    state = Page(
        (
            Part("qkv", "float16", 2, 0, (lead, Axis("rows", ROWS, 2))),
            Part(
                "ssm",
                "float32",
                4,
                2 * ROWS * channels,
                (Axis("heads", STATE_HEADS, 4 * STATE, first, heads), Axis("state", STATE, 4)),
            ),
        )
    )
    # The block of an engine grows until it holds the state; where it does not here, the rest is padding.
    stride = max(block * 2 * ITEMS, state.nbytes)
    groups = (Group("mla", block, block // kernel), Group("ssm", block), Group("ssm", block))
    layers = tuple(
        Layer(f"{name}.{slot}", group, slot, 0, blocks, stride, page, kernel * 2 * ITEMS if group == 0 else None)
        for slot in range(2)
        for group, (name, page) in enumerate((("mla", attention), ("kda_a", state), ("kda_b", state)))
    )
    regions = tuple(Region(base + slot * (blocks * stride + 64), blocks * stride) for slot in range(2))
    return Geometry(regions, groups, layers, tp_rank, tp_size)


def sweep(local_cut: tuple[int, int], remote_cut: tuple[int, int], tokens: int, tp_size: int = 2) -> tuple[object, ...]:
    """Build upstream's request: `tokens` tokens on D, all but the last of them computed on P, ids with gaps."""
    matched = tokens - 1
    ours, other = -(-tokens // local_cut[0]), -(-matched // remote_cut[0])
    local = latent_hybrid(1 << 20, *local_cut, 2 * ours + 4)
    remotes = [latent_hybrid(1 << 30 | r << 24, *remote_cut, 2 * other + 4, r, tp_size) for r in range(tp_size)]
    # Upstream's ids 1, 3, 5 .. of D and 2, 4, 6 .. of P, one higher here: block 0 is the null block.
    local_spans = [Span(0, [2 * i + 2 for i in range(ours)]), Span(0, [1]), Span(0, [2 * ours + 3])]
    remote_spans = [Span(0, [2 * i + 3 for i in range(other)]), Span(0, [2]), Span(0, [1])]
    return local, remotes, matched, local_spans, remote_spans


def keep(case: tuple[object, ...]) -> None:
    local, remotes, *request = case
    oracle = Oracle(local, remotes)
    for descriptor_bytes in (0, DEFAULT_DESCRIPTOR_BYTES):
        plan = kvhma.plan(local, remotes, descriptor_bytes=descriptor_bytes)
        transfer = plan.transfer(*request)
        report = oracle.check(*request, transfer)
        assert report.mergeable == 0
        # A latent is read once, from any rank that holds it; a state from every rank.
        assert [read.source for read in transfer.reads] == list(range(len(remotes)))


@pytest.mark.parametrize("blocks", [(12, 8), (36, 8), (24, 4), (16, 24)], ids=str)
def test_blocks_of_other_sizes(blocks: tuple[int, int]) -> None:
    for tokens in range(2, 40):
        keep(sweep((blocks[0], 4), (blocks[1], 4), tokens))


@pytest.mark.parametrize("tokens", [2, 5, 8, 9, 13, 16, 17, 21, 24, 25, 29, 32, 33, 41, 48, 49])
def test_kernel_blocks_of_other_sizes_too(tokens: int) -> None:
    keep(sweep((24, 8), (8, 4), tokens))
    # The direction that upstream cannot do: P's kernel block is the larger one.
    keep(sweep((8, 4), (24, 8), tokens))


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 640, 767, 768, 769, 2304, 5759, 5760, 5761, 6529])
def test_a_block_of_ninety_kernel_blocks(tokens: int) -> None:
    keep(sweep((5760, 64), (768, 64), tokens, tp_size=4))
