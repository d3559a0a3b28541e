# SPDX-License-Identifier: Apache-2.0
"""Every model of the table from rank to rank over NIXL: all layers, real page sizes, few blocks."""

from __future__ import annotations

import contextlib
import random

import pytest

import kvhma
from kvhma.errors import LayoutError
from kvhma.models import Model, model, models
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.ranks import ENCODINGS, Moved, Ranks
from support.summary import summary
from support.tables import count_blocks, draw_tables

pytestmark = pytest.mark.nixl

CACHE_BYTES = 32 << 20
"""Bytes of one rank, if possible. If a model needs more, one rank of several replaces the only rank."""

MANY_TENSORS = 16
"""With more blocks they are one region, as in real engines: the oracle makes other stale bytes for each region."""

SPARE = 1
"""Blocks of other requests, apart from the null block."""


def rank_of(one: Model, num_blocks: int, tp_size: int) -> kvhma.Geometry:
    return layout(
        one,
        LayoutOptions(
            num_blocks=num_blocks,
            tp_rank=tp_size - 1,
            tp_size=tp_size,
            kernel_block="flashinfer",
            one_storage=summary(one).tensors > MANY_TENSORS,
        ),
    )


def prompt(one: Model, geometry: kvhma.Geometry) -> int:
    """Return tokens that reach past the window or chunk, fill two blocks and end inside of a kernel block."""
    block = max(group.block_size for group in geometry.groups if group.kind != "ssm")
    limit = one.window or one.chunk
    return max(limit + 4 * block if limit else 0, 2 * block, 600) + block // 3 + 6


def scaled(one: Model) -> tuple[kvhma.Geometry, int]:
    """Return the last rank of as few as keep the cache small, with just enough blocks, and the tokens.

    If vLLM does not divide a model over that many ranks, of as many as it does.
    """
    found = None
    for tp_size in (1, 2, 4, 8, 16):
        try:
            probe = rank_of(one, 1, tp_size)
        except LayoutError:
            break
        tokens = prompt(one, probe)
        num_blocks = 1 + SPARE + count_blocks(probe, tokens, ahead=1)
        found = rank_of(one, num_blocks, tp_size), tokens
        if num_blocks * sum(region.bytes for region in probe.regions) <= CACHE_BYTES:
            break
    assert found is not None
    return found


@pytest.mark.parametrize("name", models())
def test_model(name: str) -> None:
    geometry, tokens = scaled(model(name))
    rng = random.Random(name)
    # D holds three quarters of the prompt already, in whole blocks, but no state.
    hit = [0 if group.kind == "ssm" else tokens * 3 // 4 // group.block_size for group in geometry.groups]
    local = kvhma.live_spans(geometry, tokens, draw_tables(geometry, tokens, rng, ahead=1), hit)
    remote = kvhma.live_spans(geometry, tokens, draw_tables(geometry, tokens, rng))
    assert all(span.first for span, group in zip(local, geometry.groups, strict=True) if group.kind != "ssm")
    with contextlib.closing(Ranks(1)) as ranks:
        (fetched,) = ranks.hand_off([geometry], [remote], [geometry], [local], tokens)
    assert list(fetched) == list(ENCODINGS)
    for encoding, moved in fetched.items():
        assert isinstance(moved, Moved), f"{encoding}: {moved}"
        assert moved.measured == moved.planned, encoding
        assert list(moved.planned) == [0]
        assert moved.bytes == moved.report.moved > 0
        # The block ahead has no tokens.
        assert moved.report.zeroed > 0
        assert moved.report.untouched > 0
