# SPDX-License-Identifier: Apache-2.0
"""Requests whose size vLLM's NIXL connector computed, and the file with the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from kvhma.cli.block_tables import sequence_blocks
from kvhma.cli.compare.engines import Engines
from kvhma.geometry import Geometry
from kvhma.models import Model
from kvhma.models.config import model_from_config
from kvhma.models.stride_orders import Order
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.cli_configs import CONFIGS
from support.families import FAMILIES

RECORDED = Path(__file__).parents[1] / "golden" / "nixl_connector.json"
TOKENS = 300
_GAP = 1 << 44
_SPARSE, _SPARSE_BLOCK = "DeepSeek-V3.2", 64
"""The indexer's kernel has no other block size."""


def _deepseek_v32() -> dict[str, Any]:
    """Return all 61 layers: each has two pages, of 18,432 and 2,112 bytes for 16 tokens."""
    return {**FAMILIES["DeepSeek-V3.2"], "num_hidden_layers": 61}


def _runnable(form: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that vLLM's CPU build can make a model of, with the same cache."""
    form = {key: value for key, value in form.items() if key != "quantization_config"}  # of weights
    form = {key: value.replace("E", "-") if key == "hybrid_override_pattern" else value for key, value in form.items()}
    text = {"vocab_size": 512, **form.get("text_config", {})}
    return {**form, "vocab_size": 512} | ({"text_config": text} if "text_config" in form else {})


FORMS = {
    **{name: _runnable(form) for name, form in CONFIGS.items() if not name.endswith("FP8kv")},
    **FAMILIES,
    "DeepSeek-V3.2, 61 layers": _deepseek_v32(),
}
"""Every built-in model by its name in the table, and families whose layers differ in size.

One built-in model differs from another only in its cache's dtype, which vLLM's CPU build does not have.
"""


@dataclass(frozen=True)
class NixlRequest:
    """A prompt of :data:`TOKENS` tokens between two engines; of a pair, P's comes first.

    Attributes:
        model: one of :data:`FORMS`.
        tp: tensor-parallel ranks.
        asked_blocks: ``--block-size``.
        order: stride order.
    """

    model: str
    tp: tuple[int, int] = (1, 1)
    asked_blocks: tuple[int, int] = (16, 16)
    order: Order = "LBHNC"

    @property
    def name(self) -> str:
        """What the file calls it."""
        return (
            f"{self.model} tp{self.tp[0]}-{self.tp[1]} block{self.asked_blocks[0]}-{self.asked_blocks[1]} {self.order}"
        )

    @property
    def form(self) -> dict[str, Any]:
        """The ``config.json``."""
        return FORMS[self.model]

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Blocks of both pools: as few as hold the prompt."""
        prefill, decode = (1 + max(map(max, table)) for table in self.tables())
        return prefill, decode

    def tables(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the block tables of P and D."""
        return _tables(self)

    def engines(self) -> Engines:
        """Return all ranks. Kernel blocks are as long as blocks, as those of Triton's attention, or 64 tokens."""

        def lay_out(side: int, kernel: int | None = None) -> list[Geometry]:
            blocks = self.num_blocks[side]
            return [self.rank(side, rank, blocks, kernel) for rank in range(self.tp[side])]

        return Engines(lay_out(1), lay_out(0), lambda kernel: lay_out(1, kernel))

    def rank(self, side: int, rank: int, num_blocks: int, kernel: int | None = None) -> Geometry:
        """Build the layout of a rank of P (0) or D (1)."""
        options = LayoutOptions(
            num_blocks=num_blocks,
            tp_rank=rank,
            tp_size=self.tp[side],
            block_size=self.asked_blocks[side],
            kernel_block=kernel or (_SPARSE_BLOCK if self.model.startswith(_SPARSE) else None),
            order=self.order,
            base=_GAP * (1 + 64 * side + rank),
        )
        return layout(_model(self.model), options)


@cache
def _tables(asked: NixlRequest) -> tuple[list[list[int]], list[list[int]]]:
    prefill, decode = ([ids.tolist() for ids in sequence_blocks(asked.rank(side, 0, 2), TOKENS)] for side in (0, 1))
    return prefill, decode


@cache
def _model(name: str) -> Model:
    return model_from_config(FORMS[name])


def requests() -> Iterator[NixlRequest]:
    """Yield every request of the file."""
    for name in FORMS:
        block = _SPARSE_BLOCK if name.startswith(_SPARSE) else 16
        same = (block, block)
        yield NixlRequest(name, (1, 1), same)
        yield NixlRequest(name, (1, 2), same)
        yield NixlRequest(name, (2, 1), same)
        yield NixlRequest(name, (1, 1), same, "BLHNC")
        yield NixlRequest(name, (1, 1), (block, 4 * block))


def recorded_answers() -> dict[str, Any]:
    """Return by the request's name what vLLM reads: descriptors and bytes by rank of D, or its error."""
    return cast("dict[str, Any]", json.loads(RECORDED.read_text(encoding="utf-8")))
