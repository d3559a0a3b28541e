# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on one side only, for models with a recurrent state.

The tests write and read the convolution's state as vLLM's kernels do (``causal_conv1d_fn`` and
``causal_conv1d_update`` of 0.31 to 0.33; Triton's interpreter agreed). vLLM's own manager gives out the slots. Only the
plan is between the two engines.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

import kvhma
from kvhma.geometry import Geometry, Group, Span
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.caches.layer_parts import RankInfo
from support.memory import carry_out_in_place
from support.vllm_caches import allocated

TAPS, HEADS, HEAD, STATE, GROUPS = 4, 4, 4, 2, 1
CHANNELS = HEADS * HEAD + 2 * GROUPS * STATE
BLOCKS = 6
WEIGHT = np.random.default_rng(7).standard_normal((CHANNELS, TAPS)).astype(np.float32)
MAMBA2, GDN = MambaAttentionBackendEnum.MAMBA2, MambaAttentionBackendEnum.GDN_ATTN
SHORT = MambaAttentionBackendEnum.SHORT_CONV


def state_spec(drafts: int, order: str, kind: Any = MAMBA2, tp: int = 1, **more: Any) -> MambaSpec:
    """Shapes as vLLM's layers give them: a row of inputs more for each draft."""
    if kind is MAMBA2:
        channels = HEADS // tp * HEAD + 2 * max(1, GROUPS // tp) * STATE
    elif kind is SHORT:
        channels = HEADS * HEAD // tp
    else:
        channels = (HEADS * HEAD + 2 * HEADS * STATE) // tp
    rows = TAPS - 1 + drafts
    conv = (channels, rows) if order == "DS" else (rows, channels)
    return MambaSpec(
        block_size=16,
        shapes=(conv,) if kind is SHORT else (conv, (HEADS // tp, HEAD, STATE)),
        dtypes=(torch.float32,) if kind is SHORT else (torch.float32, torch.float32),
        mamba_type=kind,
        num_speculative_blocks=drafts,
        **more,
    )


class Engine:
    """The memory of one layer of state, spoiled with NaN, and what the connector says of it."""

    def __init__(self, spec: MambaSpec, rank: int = 0, tp: int = 1) -> None:
        self.spec = spec
        self.raw, views, config = allocated(spec, BLOCKS)
        self.raw.fill_(-1)
        self.geometry: Geometry = geometry_of(config, views, RankInfo(rank, tp, state_groups=GROUPS))

    def conv(self, block: int) -> Any:
        """The convolution's state of one block, channels by rows, in either order of the two."""
        page = self.raw.numpy()[block * self.spec.page_size_bytes :][: self.spec.page_size_bytes]
        shape = self.spec.shapes[0]
        state = page[: shape[0] * shape[1] * 4].view(np.float32).reshape(shape)
        return state if shape[1] == TAPS - 1 + self.spec.num_speculative_blocks else state.T

    def ssm(self, block: int) -> Any:
        shapes = self.spec.shapes
        start = block * self.spec.page_size_bytes + shapes[0][0] * shapes[0][1] * 4
        size = shapes[1][0] * shapes[1][1] * shapes[1][2] * 4
        return self.raw.numpy()[start : start + size].view(np.float32)


def convolve(inputs: Any) -> Any:
    """The definition: each output is of the last taps of its inputs, and zeros before the first."""
    padded = np.concatenate([np.zeros((TAPS - 1, CHANNELS), np.float32), inputs])
    return np.stack([(padded[at : at + TAPS].T * WEIGHT).sum(1) for at in range(len(inputs))])


def prefill(state: Any, inputs: Any, *, first: bool) -> Any:
    """The kernel of prefills: reads and writes the first rows, and leaves those for drafts as they are."""
    before = np.zeros((CHANNELS, TAPS - 1), np.float32) if first else state[:, : TAPS - 1].copy()
    full = np.concatenate([before, inputs.T], axis=1)
    state[:, : TAPS - 1] = full[:, -(TAPS - 1) :]
    return np.stack([(full[:, at : at + TAPS] * WEIGHT).sum(1) for at in range(len(inputs))])


def update(state: Any, inputs: Any, accepted: int | None) -> Any:
    """The kernel of decode steps: with drafts it starts at the row that the accepted ones of the last step moved to."""
    at = 0 if accepted is None else accepted - 1
    full = np.concatenate([state[:, at : at + TAPS - 1].copy(), inputs.T], axis=1)
    # One row less than the inputs that were there, and a row for every input of this step.
    rows = TAPS - 1 if accepted is None else TAPS - 2 + len(inputs)
    state[:, :rows] = full[:, -rows:]
    return np.stack([(full[:, i : i + TAPS] * WEIGHT).sum(1) for i in range(len(inputs))])


def copied(local: Engine, remotes: list[Engine], spans: tuple[list[Span], list[Span]]) -> None:
    """Do what the plan says, to the memory."""
    plan = kvhma.plan(local.geometry, [remote.geometry for remote in remotes])
    carry_out_in_place(plan.transfer(9, *spans))


DRAFTS = [(0, 0), (0, 3), (3, 0), (3, 3), (1, 3), (2, 1)]
ORDERS = list(itertools.product(["SD", "DS"], ["SD", "DS"]))


@pytest.mark.parametrize(("here", "there"), ORDERS)
@pytest.mark.parametrize(("p_drafts", "d_drafts"), DRAFTS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("tail", [False, True], ids=["one prefill", "a tail of one token"])
def test_d_computes_what_it_would_have(p_drafts: int, d_drafts: int, here: str, there: str, tokens: int, tail: bool):
    inputs = np.random.default_rng(tokens).standard_normal((tokens + 9, CHANNELS)).astype(np.float32)
    expected = convolve(inputs)
    p, d = Engine(state_spec(p_drafts, there)), Engine(state_spec(d_drafts, here))
    state = p.conv(2)
    split = tokens - 1 if tail and tokens > 1 else tokens
    done = prefill(state, inputs[:split], first=True)
    if split < tokens:  # vLLM takes a last token by itself for a decode step without drafts
        done = np.concatenate([done, update(state, inputs[split:tokens], 1 if p_drafts else None)])
    np.testing.assert_allclose(done, expected[:tokens], atol=1e-5)
    p.ssm(2)[:] = np.arange(p.ssm(2).size)

    spans = [Span(0, [4])], [Span(0, [2])]
    copied(d, [p], spans)
    np.testing.assert_array_equal(d.ssm(4), np.arange(d.ssm(4).size))
    # The first step: the last token of the prompt, where D pads its steps with rows for drafts that were not made.
    state, at, accepted = d.conv(4), tokens, 1
    for width in (1 + d_drafts, 1, 1 + d_drafts):
        step = update(state, inputs[at : at + width], accepted if d_drafts else None)
        np.testing.assert_allclose(step, expected[at : at + width], atol=1e-5)
        accepted = width  # all of them, so that the next step starts at the last row
        at += width


@pytest.mark.parametrize(("p_drafts", "d_drafts"), DRAFTS)
@pytest.mark.parametrize(("here", "there"), ORDERS)
@pytest.mark.parametrize("kind", [MAMBA2, GDN, SHORT], ids=["mamba2", "gdn", "short"])
@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (2, 1), (2, 2)])
def test_over_ranks(p_drafts: int, d_drafts: int, here: str, there: str, kind: Any, mine: int, theirs: int) -> None:
    """Only rows of the state reach rows of the state, however many rows each side has for drafts."""

    def fill(engine: Engine, rank: int, size: int) -> None:
        """Each item says its global channel and its row."""
        layer = engine.geometry.layers[0]
        state, at = engine.conv(1), 0
        for part in (part for part in layer.page.parts if part.name != "ssm"):
            channels = part.axes[0]
            names = np.arange(channels.start, channels.start + channels.length) + 1000 * ord(part.name)
            rows = np.arange(TAPS - 1)
            state[at : at + channels.length, : TAPS - 1] = names[:, None] * 10 + rows
            at += channels.length

    sources = [Engine(state_spec(p_drafts, there, kind, theirs), rank, theirs) for rank in range(theirs)]
    for rank, source in enumerate(sources):
        fill(source, rank, theirs)
    for rank in range(mine):
        d, wanted = (Engine(state_spec(d_drafts, here, kind, mine), rank, mine) for _ in range(2))
        fill(wanted, rank, mine)
        copied(d, sources, ([Span(0, [1])], [Span(0, [1])]))
        np.testing.assert_array_equal(d.conv(1)[:, : TAPS - 1], wanted.conv(1)[:, : TAPS - 1])


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (2, 1), (4, 2), (2, 2)])
def test_linear_attention_over_ranks(mine: int, theirs: int, drafts: int) -> None:
    """vLLM's shape of a rank: a matrix of each of its heads, and heads follow each other over the ranks."""

    def engine(rank: int, size: int) -> tuple[Engine, Any]:
        spec = MambaSpec(
            block_size=16,
            shapes=MambaStateShapeCalculator.linear_attention_state_shape(num_heads=4, tp_size=size, head_dim=3),
            dtypes=(torch.float32,),
            mamba_type=MambaAttentionBackendEnum.LINEAR,
            num_speculative_blocks=drafts,
        )
        made = Engine(spec, rank, size)
        page = made.raw.numpy()[spec.page_size_bytes :][: spec.page_size_bytes]
        return made, page.view(np.float32).reshape(spec.shapes[0])

    whole = np.arange(4 * 3 * 3, dtype=np.float32).reshape(4, 3, 3)
    sources = []
    for rank in range(theirs):
        source, state = engine(rank, theirs)
        state[:] = np.split(whole, theirs)[rank]
        sources.append(source)
    for rank in range(mine):
        d, state = engine(rank, mine)
        copied(d, sources, ([Span(0, [1])], [Span(0, [1])]))
        np.testing.assert_array_equal(state, np.split(whole, mine)[rank])


# --- Slots ----------------------------------------------------------------------------------------------------

BLOCK = 16


def manager(spec: MambaSpec) -> tuple[KVCacheManager, Geometry]:
    """vLLM's manager of one group of attention and one of state, and the geometry that the connector makes of them."""
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["attn"], attention), KVCacheGroupSpec(["mixer"], spec)]
    config = KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=groups)
    made = KVCacheManager(config, 512, max(BLOCK, spec.block_size), BLOCK, enable_caching=False)
    state = Engine(spec).geometry
    layers = tuple(replace(layer, group=1) for layer in state.layers)
    return made, replace(state, groups=(Group("full", BLOCK), *state.groups), layers=layers)


def request(tokens: int) -> Request:
    return Request("r", list(range(tokens)), SamplingParams(max_tokens=8), None)


def slot(spec: MambaSpec, table: list[int], tokens: int) -> int:
    """Block whose state vLLM's kernels take for that of so many tokens."""
    row = torch.tensor([table + [0] * 40], dtype=torch.int32)
    found = mamba_get_block_table_tensor(row, torch.tensor([tokens]), spec, spec.mamba_cache_mode)
    return int(found[0, 0])


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 47, 48, 70])
def test_the_block_that_bears_the_state(mode: str, drafts: int, tokens: int) -> None:
    block = 512 if mode == "none" else BLOCK
    spec = state_spec(drafts, "SD", mamba_cache_mode=mode)
    spec = replace(spec, block_size=block)
    # P computes its prompt in steps that end at blocks, as vLLM's scheduler sees to where states are cached.
    p, geometry = manager(spec)
    prompt = request(tokens)
    while prompt.num_computed_tokens < tokens:
        step = min(2 * BLOCK, tokens - prompt.num_computed_tokens)
        assert p.allocate_slots(prompt, step, num_lookahead_tokens=drafts) is not None
        prompt.num_computed_tokens += step
    tables = [list(ids) for ids in p.get_block_ids("r")]
    (_, state) = kvhma.live_spans(geometry, tokens, tables)
    assert state.ids == [slot(spec, tables[1], tokens)]

    # D loads them, with room for them only, and then computes the next token.
    d, geometry = manager(spec)
    resumed = request(tokens + 1)
    external = {"num_external_computed_tokens": tokens, "delay_cache_blocks": True}
    assert d.allocate_slots(resumed, 0, num_lookahead_tokens=drafts, **external) is not None
    tables = [list(ids) for ids in d.get_block_ids("r")]
    (_, state) = kvhma.live_spans(geometry, tokens, tables)
    assert state.ids == [slot(spec, tables[1], tokens)]
    resumed.num_computed_tokens = tokens
    assert d.allocate_slots(resumed, 1, num_lookahead_tokens=drafts) is not None
    assert slot(spec, list(d.get_block_ids("r")[1]), tokens) == state.ids[0]
