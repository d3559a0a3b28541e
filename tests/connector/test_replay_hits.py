# SPDX-License-Identifier: Apache-2.0
"""Hits that a replay counts are those of vLLM's own manager of blocks, request for request."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from vllm.v1.request import Request

from connector.test_group_hits import BLOCK, MIXES, Decode, request_of
from kvhma._kvhma import prefix_hits
from kvhma.geometry import Group
from support.pairs import HERE, latent, rank, state

GROUPS = {
    "FullAttentionSpec": lambda spec: Group("full", BLOCK),
    "MLAAttentionSpec": lambda spec: Group("mla", BLOCK),
    "SlidingWindowSpec": lambda spec: Group("sliding", BLOCK, window=spec.sliding_window),
    "ChunkedLocalAttentionSpec": lambda spec: Group("chunked", BLOCK, chunk=spec.attention_chunk_size),
    "MambaSpec": lambda spec: Group("ssm", BLOCK),
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
        groups = [GROUPS[type(spec).__name__](spec) for spec in MIXES[mix]]
        pages = [state() if group.kind == "ssm" else latent(BLOCK) for group in groups]
        layers = [(f"layers.{at}", at, page) for at, page in enumerate(pages)]
        number = len(self.tokens)
        found = prefix_hits(
            np.concatenate(self.paths).astype(np.int64),
            np.concatenate(self.ends).astype(np.uint32),
            np.cumsum([0, *map(len, self.paths)]).astype(np.uint64),
            np.array([len(tokens) for tokens in self.tokens], np.uint32),
            np.array(self.answers if side != "prefill" else [1] * number, np.uint32),
            np.zeros(number, np.uint32),
            rank(HERE, groups, layers).core,
            [(at, 1) for at in range(len(groups))],
            pool,
            "prefill" if side == "prefill" else "decode",
        )
        return found.reshape(-1, len(groups), number)[-1 if side == "each group" else 0]


class Engine(Decode):
    """vLLM's manager of an engine, which loads or computes prompts one after the other."""

    def hits_of(self, tokens: list[int], answer: int, side: str) -> list[int]:
        request = request_of(f"r{random.random()}", tokens)
        if side == "prefill":
            return self.prefill(request)
        # D computes the last token itself if there is a state.
        left = int(self.manager.kv_cache_config.has_mamba_layers)
        return self.serve(request, answer - 1 + left, each_group=side == "each group", left=left)

    def prefill(self, request: Request) -> list[int]:
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        for index, step in enumerate(self.steps(request.num_tokens, hit)):
            self.manager.new_step_starts()
            of_hit = {} if index else {"num_new_computed_tokens": hit, "new_computed_blocks": blocks}
            assert self.manager.allocate_slots(request, step, **of_hit) is not None
            request.num_computed_tokens += step + (0 if index else hit)
        self.manager.free(request)
        return [len(group) * BLOCK for group in blocks.blocks]

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
