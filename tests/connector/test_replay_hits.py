# SPDX-License-Identifier: Apache-2.0
"""Hits that a replay counts are those of vLLM's own manager of blocks, request for request."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from connector.test_group_hits import BLOCK, MIXES, Decode, request_of
from kvhma._kvhma import prefix_hits

KINDS = {
    "FullAttentionSpec": lambda spec: ("full", 0),
    "MLAAttentionSpec": lambda spec: ("full", 0),
    "SlidingWindowSpec": lambda spec: ("window", spec.sliding_window),
    "ChunkedLocalAttentionSpec": lambda spec: ("chunk", spec.attention_chunk_size),
    "MambaSpec": lambda spec: ("state", 0),
}
UNIT = 24
"""Tokens of a node: blocks end within nodes and across them."""


class Traffic:
    """Prompts that share beginnings, as tokens for vLLM and as nodes for the replay."""

    def __init__(self, requests: int, seed: int) -> None:
        rng = random.Random(seed)
        paths: list[list[int]] = [[]]
        self.tokens: list[list[int]] = []
        self.paths: list[list[int]] = []
        self.ends: list[list[int]] = []
        self.answers = [rng.randrange(1, 40) for _ in range(requests)]
        node = 0
        for _ in range(requests):
            path = list(rng.choice(paths[-30:]))
            path = path[: rng.randint(len(path) // 2, len(path))]
            for _ in range(rng.randint(0, 12)):
                node += 1
                path.append(node)
            paths.append(path)
            # The last node may be a part, which then is a separate node.
            lengths = [UNIT] * len(path)
            if rng.random() < 0.7:
                node += 1
                path = [*path, node]
                lengths.append(rng.randrange(1, UNIT))
            if not path:
                node, path, lengths = node + 1, [node + 1], [UNIT]
            self.paths.append(path)
            self.ends.append(np.cumsum(lengths).tolist())
            self.tokens.append([one * 100 + at for one, many in zip(path, lengths, strict=True) for at in range(many)])

    def hits(self, mix: str, pool: int, side: str) -> np.ndarray:
        groups = [(*KINDS[type(spec).__name__](spec), BLOCK, 1) for spec in MIXES[mix]]
        number = len(self.tokens)
        found = prefix_hits(
            np.concatenate(self.paths).astype(np.int64),
            np.concatenate(self.ends).astype(np.uint32),
            np.cumsum([0, *map(len, self.paths)]).astype(np.uint64),
            np.array([len(tokens) for tokens in self.tokens], np.uint32),
            np.array(self.answers if side != "prefill" else [1] * number, np.uint32),
            np.zeros(number, np.uint32),
            groups,
            pool,
            side,
        )
        return found.reshape(len(groups), number)


class Engine(Decode):
    """vLLM's manager of an engine, which loads or computes prompts one after the other."""

    def hits_of(self, tokens: list[int], answer: int, side: str) -> list[int]:
        request = request_of(f"r{random.random()}", tokens)
        self.to_load = 0 if side == "prefill" else len(tokens)
        ask = self.vllm if side == "one hit" else self.manager.get_computed_blocks_for_connector
        blocks, hit, _ = self.manager.get_computed_blocks(request) if side == "prefill" else ask(request)[:3]
        found = [len(group) * BLOCK for group in blocks.blocks]
        external, steps = 0, list(self.steps(len(tokens), hit))
        if side != "prefill":
            # D computes the last token itself if there is a state.
            left = int(self.manager.kv_cache_config.has_mamba_layers)
            external, steps = len(tokens) - left - hit, [0, left][: 1 + left]
        for index, step in enumerate(steps):
            self.manager.new_step_starts()
            slots = self.manager.allocate_slots(
                request,
                step,
                num_new_computed_tokens=0 if index else hit,
                new_computed_blocks=None if index else blocks,
                num_external_computed_tokens=0 if index else external,
                delay_cache_blocks=bool(external) and not index,
            )
            assert slots is not None
            request.num_computed_tokens += (0 if index else hit + external) + step
            if external:
                self.manager.cache_blocks(request, request.num_computed_tokens)
        for token in range(answer - 1 if side != "prefill" else 0):
            request.append_output_token_ids(-token - 1)
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        self.manager.free(request)
        return found

    def steps(self, tokens: int, hit: int) -> Iterator[int]:
        """A step ends at the last whole block if there are states, as vLLM's scheduler does it."""
        whole = tokens // BLOCK * BLOCK
        if self.manager.kv_cache_config.has_mamba_layers and hit < whole < tokens:
            yield whole - hit
            hit = whole
        yield tokens - hit


PAIRS = [
    (mix, side)
    for mix in ("full", "full+sliding", "full+two windows", "mla+sliding", "full+chunked", "full+state")
    for side in ("prefill", "one hit", "each group")
]


@pytest.mark.parametrize(("mix", "side"), PAIRS, ids=[" ".join(pair) for pair in PAIRS])
def test_hits_are_vllms(mix: str, side: str) -> None:
    traffic, engine = Traffic(500, 1), Engine(mix, 200_000)
    counted = traffic.hits(mix, 1 << 60, side)
    for index, (tokens, answer) in enumerate(zip(traffic.tokens, traffic.answers, strict=True)):
        expected = engine.hits_of(tokens, answer, side)
        found = counted[:, index].tolist()
        assert found == expected, f"request {index} of {len(tokens)} tokens"


@pytest.mark.parametrize("side", ["prefill", "one hit", "each group"])
@pytest.mark.parametrize(("mix", "blocks"), [("full", 150), ("full+sliding", 250), ("full+chunked", 300)])
def test_a_pool_with_an_end_evicts_as_vllms(mix: str, blocks: int, side: str) -> None:
    """VLLM evicts block by block, the replay by parts of a node: nearly all hits are equal, and so is their sum."""
    traffic, engine = Traffic(400, 2), Engine(mix, blocks)
    endless = traffic.hits(mix, 1 << 60, side).astype(int)
    counted = traffic.hits(mix, blocks - 1, side).astype(int)
    pairs = zip(traffic.tokens, traffic.answers, strict=True)
    expected = np.array([engine.hits_of(tokens, answer, side) for tokens, answer in pairs]).T
    assert expected.sum() < 0.9 * endless.sum()
    assert (counted == expected).mean() > 0.93
    assert abs(counted.sum() - expected.sum()) < 0.06 * endless.sum()
