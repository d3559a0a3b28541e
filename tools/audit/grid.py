# SPDX-License-Identifier: Apache-2.0
"""The grid of the audit: each row is a request between two engines, with a name to run it again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.engines.tiny import MODELS, WITH_STATE

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_2": "NemotronHForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
"""Models of `support.engines.tiny`: small ones of families that differ in what a cache holds."""

CONNECTORS = ("pull", "push", "mooncake")
"""vLLM's: NixlConnector, by which D reads, and NixlPushConnector and MooncakeConnector, by which P writes."""

WITH_WINDOW = ("gemma3", "gemma4", "gpt_oss")
RANKS = ((1, 1), (2, 2), (1, 2), (2, 1), (2, 4), (4, 2))
"""Tensor-parallel sizes of P and D."""
MOST_RANKS = {"qwen3_next": 2, "gpt_oss": 2, "nemotron_h_2": 2}
"""For models that cannot be divided over more ranks."""
BLOCKS = ((16, 16), (16, 32), (32, 16))
LENGTHS = (300, 303, 320)
"""For a window of 64 tokens and blocks of 16.

The window begins inside of a block; at a block, with the last token's window one block earlier; and ends with a block.
"""
HITS = (0, 128)
FEWER = {"mooncake": (RANKS[:1] + RANKS[2:4], BLOCKS[:1], LENGTHS[:2])}
"""Ranks, blocks and lengths for connectors that do not run all: Mooncake's rows start servers."""


@dataclass(frozen=True)
class Row:
    """A request, by the parameters that differ.

    Attributes:
        model: name of the model.
        ranks: of P and D.
        blocks: tokens of a block of P and D; 0 where a state determines it.
        hit: tokens that D has in its prefix cache.
        prompt: tokens of the prompt.
        connector: one of :data:`CONNECTORS`.
    """

    model: str
    ranks: tuple[int, int]
    blocks: tuple[int, int]
    hit: int
    prompt: int
    connector: str = "pull"

    @property
    def name(self) -> str:
        """Name of the row, e.g. ``gemma3/tp1-2/block16-32/hit0/303``."""
        blocks = "block{}-{}".format(*self.blocks) if any(self.blocks) else "block"
        first = "" if self.connector == "pull" else f"{self.connector}/"
        return f"{first}{self.model}/tp{self.ranks[0]}-{self.ranks[1]}/{blocks}/hit{self.hit}/{self.prompt}"

    def pool(self, block: int) -> int:
        """Return how many blocks a pool needs, so that the simulated memory stays small."""
        if not block:
            return 24
        groups = 7 if self.model in WITH_WINDOW else 1
        return 16 + 2 * -(-self.prompt // block) + groups * -(-self.prompt // block)

    @property
    def form(self) -> str:
        """The model's ``config.json``."""
        more: dict[str, Any] = {"architectures": [ARCHITECTURES[self.model]], "torch_dtype": "bfloat16"}
        return json.dumps(MODELS[self.model] | more)


def grid() -> Iterator[Row]:
    """Yield all rows, connector by connector."""
    for connector, model in itertools.product(CONNECTORS, ARCHITECTURES):
        all_ranks, all_blocks, lengths = FEWER.get(connector, (RANKS, BLOCKS, LENGTHS))
        blocks: tuple[tuple[int, int], ...] = ((0, 0),) if model in WITH_STATE else all_blocks
        for ranks, sizes, prompt in itertools.product(all_ranks, blocks, lengths):
            if max(ranks) > MOST_RANKS.get(model, 4):
                continue
            # A state is in the prefix cache only at the ends of blocks, and a short prompt has few ends.
            for hit in (0,) if model in WITH_STATE else HITS:
                yield Row(model, ranks, sizes, hit, prompt, connector)
