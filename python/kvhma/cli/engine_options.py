# SPDX-License-Identifier: Apache-2.0
"""How one engine is described on the command line: ``tp=2,block=16,kernel=flashinfer``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import click

from kvhma.geometry import Geometry
from kvhma.models import Model
from kvhma.models.pages import ConvOrder
from kvhma.models.stride_orders import Order
from kvhma.models.vllm_layout import LayoutOptions, layout

MAX_RANKS = 256
_MAX_BLOCK = 1 << 20
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    **{name: name for name in ("bfloat16", "float16", "float32", "float8_e4m3fn")},
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One engine.

    Attributes:
        tp: tensor-parallel ranks.
        block: tokens per block that the engine was started with.
        kernel: kernel block: a number of tokens, ``"flashinfer"``, or ``"logical"`` for the whole block.
        kv: dtype of the KV cache; None for the model's.
        ssm: dtype of the recurrent state; None for the model's.
        layout: stride order of a page.
        conv: how the convolution state lies.
        spec: draft tokens of speculative decoding.
    """

    tp: int = 1
    block: int = 16
    kernel: int | str = "flashinfer"
    kv: str | None = None
    ssm: str | None = None
    layout: str = "LBHNC"
    conv: str = "DS"
    spec: int = 0

    def model(self, model: Model) -> Model:
        """Return the model as this engine caches it: its dtypes, and room for a row of convolution for each draft."""
        if self.kv:
            model = replace(model, dtype=self.kv)
        if model.state is not None:
            # vLLM keeps none for Mamba1.
            drafts = 0 if model.state.kind == "mamba1" else self.spec
            state = replace(model.state, draft_rows=drafts, ssm_dtype=self.ssm or model.state.ssm_dtype)
            model = replace(model, state=state)
        return model

    def rank(self, model: Model, tp_rank: int, num_blocks: int, base: int, kernel: int | None = None) -> Geometry:
        """Lay one rank out; `kernel` is a kernel block in place of the engine's own.

        Raises:
            KvhmaError: the model cannot be laid out so.
        """
        asked = kernel or (None if self.kernel == "logical" else self.kernel)
        options = LayoutOptions(
            num_blocks=num_blocks,
            tp_rank=tp_rank,
            tp_size=self.tp,
            block_size=self.block,
            kernel_block=cast("int | Literal['flashinfer'] | None", asked),
            order=cast("Order", self.layout),
            conv=cast("ConvOrder", self.conv),
            speculative=self.spec,
            base=base,
        )
        return layout(self.model(model), options)

    def ranks(self, model: Model, num_blocks: int, base: int, step: int, kernel: int | None = None) -> list[Geometry]:
        """Lay all ranks out, `step` bytes apart. Errors as for `rank`."""
        return [self.rank(model, rank, num_blocks, base + rank * step, kernel) for rank in range(self.tp)]


def parse_engine(ctx: click.Context, param: click.Parameter, text: str) -> EngineOptions:
    """Parse an option's value; what is wrong is named with its value.

    Raises:
        click.BadParameter: an unknown key, one that is there twice, or a value out of range.
    """
    given: dict[str, Any] = {}
    for item in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals or key not in _KEYS:
            raise click.BadParameter(f"{item!a}: expected key=value with a key of {', '.join(_KEYS)}", ctx, param)
        if key in given:
            raise click.BadParameter(f"{key} is there twice", ctx, param)
        try:
            given[key] = _KEYS[key](value)
        except ValueError as error:
            raise click.BadParameter(f"{key}={value}: {error}", ctx, param) from error
    return EngineOptions(**given)


def within(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of integers in a range."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdecimal() or not text.isascii():
            raise ValueError("must be an integer")
        if len(text) > 18 or not low <= int(text) <= high:
            raise ValueError(f"must be {low} to {high}")
        return int(text)

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text

    return parse


def dtype(text: str) -> str:
    """Parse the name of a dtype, long or short.

    Raises:
        ValueError: it is not known.
    """
    if text not in _DTYPES:
        raise ValueError(f"must be one of {', '.join(_DTYPES)}")
    return _DTYPES[text]


def _kernel(text: str) -> int | str:
    return text if text in ("flashinfer", "logical") else within(1, _MAX_BLOCK)(text)


_KEYS: dict[str, Callable[[str], Any]] = {
    "tp": within(1, MAX_RANKS),
    "block": within(1, _MAX_BLOCK),
    "kernel": _kernel,
    "kv": dtype,
    "ssm": dtype,
    "layout": _one_of(*get_args(Order)),
    "conv": _one_of(*get_args(ConvOrder)),
    "spec": within(0, 64),
}
