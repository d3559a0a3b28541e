# SPDX-License-Identifier: Apache-2.0
"""The columns beside kvhma's, by hand; and the oracles of what is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvhma._kvhma import first_needed_tokens
from kvhma.cli.block_tables import sequence_blocks
from kvhma.cli.columns import Count, whole_blocks, whole_prompt
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.hand_off import HandOff, RequestOptions, count, of_model
from kvhma.geometry import Group
from kvhma.models import Model, State, model, models
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.oracle.labels import first_needed
from support.needed import needed
from support.pairs import HERE, latent, rank
from support.tables import undropped_blocks

MAMBA2 = State("mamba2", 40, 4, 4, 8, 4, 1, "bfloat16", "float32")
SLIDING = Model("sliding", ("sliding", "full") * 2, 4, 8, window=24)
HYBRID = Model("hybrid", ("mamba2", "mamba2", "full") * 2, 4, 8, state=MAMBA2)
TOKEN = 2 * 4 * 8 * 2
"""Bytes of a token in an attention layer of these models: K and V of 4 heads."""


def hand_off(one: Model, tokens: int, cached: int = 0, *, p: Any = None, d: Any = None) -> HandOff:
    sides = (replace(EngineOptions(), **(side or {})) for side in (p, d))
    return of_model(one, *sides, RequestOptions(tokens, cached))


def columns(asked: HandOff) -> tuple[Count, Count]:
    (local,) = asked.decode
    return (
        whole_blocks(local, asked.held, asked.spans(local)[0]),
        whole_prompt(local, asked.held, asked.tokens),
    )


def test_live_blocks_and_blocks_of_the_prompt() -> None:
    """100 tokens in blocks of 16: a window of 24 lives in 3 of 7."""
    live, prompt = columns(hand_off(SLIDING, 100))
    assert live == Count(2 * (3 + 7), 2 * (3 + 7) * 16 * TOKEN)
    assert prompt == Count(4 * 7, 4 * 7 * 16 * TOKEN)


def test_a_hit_leaves_blocks_out_of_one_column_only() -> None:
    live, prompt = columns(hand_off(SLIDING, 100, 32))
    assert live == Count(2 * (3 + 5), 2 * (3 + 5) * 16 * TOKEN)
    assert prompt.descriptors == 4 * 7


def test_shorter_blocks_of_p_are_separate() -> None:
    live, _ = columns(hand_off(SLIDING, 128, d={"block_size": 64}))
    assert live == Count(2 * (1 + 2) * 4, 2 * (1 + 2) * 64 * TOKEN)


def test_k_and_v_apart_are_two_descriptors() -> None:
    one = layout(SLIDING, LayoutOptions(num_blocks=40, kv="apart"))
    held = {layer.name: 16 for layer in one.layers}
    assert whole_prompt(one, held, 100) == Count(2 * 4 * 7, 4 * 7 * 16 * TOKEN)


def test_layers_that_p_lacks_are_not_counted() -> None:
    one = layout(SLIDING, LayoutOptions(num_blocks=40))
    assert whole_prompt(one, {one.layers[0].name: 16}, 100) == Count(7, 7 * 16 * TOKEN)


def test_a_state_is_one_block() -> None:
    asked = hand_off(HYBRID, 1000)
    states = [
        layer.page.nbytes for layer in asked.decode[0].layers if asked.decode[0].groups[layer.group].kind == "ssm"
    ]
    block = next(group.block_size for group in asked.decode[0].groups if group.kind == "full")
    blocks = -(-1000 // block)
    for column in columns(asked):
        assert column.bytes == sum(states) + 2 * blocks * block * TOKEN


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("pool", ["fresh", "used"])
def test_neither_column_has_fewer_bytes_than_kvhma(name: str, pool: Any) -> None:
    asked = of_model(model(name), EngineOptions(), EngineOptions(), RequestOptions(5000, 0, pool))
    counted = count(asked)
    (live,), (prompt,) = counted.whole_blocks, counted.whole_prompt
    assert counted.total.bytes <= live.bytes <= prompt.bytes
    assert counted.total.descriptors <= live.descriptors


def test_needed_counts_live_kernel_blocks() -> None:
    one = layout(SLIDING, LayoutOptions(num_blocks=40, block_size=16, kernel_block=4))
    page = one.layers[0].page.nbytes
    # From token 50 - 24 + 1 = 27 on: kernel blocks 6..12 of the sliding layers, 0..12 of the full ones.
    assert needed(one, 50) == Count(2 * 7 + 2 * 13, (2 * 7 + 2 * 13) * page)
    assert needed(one, 0) == Count(0, 0)


@pytest.mark.parametrize(
    ("group", "tokens", "first"),
    [
        (Group("full", 16), 100, 0),
        (Group("mla", 16), 100, 0),
        (Group("sliding", 16, window=24), 24, 1),
        (Group("sliding", 16, window=24), 23, 0),
        (Group("sliding", 16, window=24), 100, 77),
        (Group("sliding", 16, window=1), 100, 100),
        (Group("chunked", 16, chunk=32), 31, 0),
        (Group("chunked", 16, chunk=32), 32, 32),
        (Group("chunked", 16, chunk=32), 100, 96),
    ],
)
def test_first_needed(group: Group, tokens: int, first: int) -> None:
    """The oracle and the core state the rule independently."""
    assert first_needed(group, tokens) == first
    assert first_needed_tokens(rank(HERE, (group,), [("layer", 0, latent(16, 1))], blocks=2), tokens) == [first]


def test_sequence_blocks() -> None:
    one = layout(SLIDING, LayoutOptions(num_blocks=40))
    assert [table.tolist() for table in sequence_blocks(one, 100)] == [[0, 0, 0, 0, 1, 2, 3], [*range(4, 11)]]
    assert [len(table) for table in undropped_blocks(one, 100)] == [7, 7]
    bare = replace(one, null_block=None)
    assert [table.tolist() for table in sequence_blocks(bare, 100)] == [[1, 2, 3], [*range(4, 11)]]
    hybrid = layout(HYBRID, LayoutOptions(num_blocks=40, speculative=2))
    assert [len(table) for table in sequence_blocks(hybrid, 17)] == [3, 3, 2]
