# SPDX-License-Identifier: Apache-2.0
"""How one engine is described on the command line: ``tp=2,block=16,kernel=flashinfer``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import click

from kvhma.geometry import Geometry
from kvhma.models import Model
from kvhma.models.block_size import KernelBlock
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(LayoutOptions):
    """One engine: what its ranks have in common, and dtypes in place of the model's.

    Attributes:
        kv_dtype: dtype of the KV cache; None for the model's.
        ssm_dtype: dtype of the recurrent state; None for the model's.
    """

    num_blocks: int = 2
    kernel_block: KernelBlock = "flashinfer"
    kv_dtype: str | None = None
    ssm_dtype: str | None = None

    def model(self, model: Model) -> Model:
        """Return the model as this engine caches it: its dtypes, and room for a row of convolution for each draft."""
        if self.kv_dtype:
            model = replace(model, dtype=self.kv_dtype)
        if model.state is not None:
            # vLLM keeps none for Mamba1.
            drafts = 0 if model.state.kind == "mamba1" else self.speculative
            state = replace(model.state, draft_rows=drafts, ssm_dtype=self.ssm_dtype or model.state.ssm_dtype)
            model = replace(model, state=state)
        return model

    def rank(self, model: Model, tp_rank: int, num_blocks: int, base: int, kernel: int | None = None) -> Geometry:
        """Lay one rank out; `kernel` is a kernel block in place of the engine's own.

        Raises:
            KvhmaError: the model cannot be laid out so.
        """
        options = replace(
            self, tp_rank=tp_rank, num_blocks=num_blocks, base=base, kernel_block=kernel or self.kernel_block
        )
        return layout(self.model(model), options)

    def ranks(self, model: Model, num_blocks: int, base: int, step: int, kernel: int | None = None) -> list[Geometry]:
        """Lay all ranks out, `step` bytes apart. Errors as for `rank`."""
        return [self.rank(model, rank, num_blocks, base + rank * step, kernel) for rank in range(self.tp_size)]


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
        field, parse = _KEYS[key]
        if field in given:
            raise click.BadParameter(f"{key} is there twice", ctx, param)
        try:
            given[field] = parse(value)
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


def _kernel(text: str) -> KernelBlock:
    if text == "flashinfer":
        return "flashinfer"
    return None if text == "logical" else within(1, _MAX_BLOCK)(text)


_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "tp": ("tp_size", within(1, MAX_RANKS)),
    "block": ("block_size", within(1, _MAX_BLOCK)),
    "kernel": ("kernel_block", _kernel),
    "kv": ("kv_dtype", dtype),
    "ssm": ("ssm_dtype", dtype),
    "layout": ("order", _one_of(*get_args(Order))),
    "conv": ("conv", _one_of(*get_args(ConvOrder))),
    "spec": ("speculative", within(0, 64)),
}
"""Keys of an engine: the field that each is, and what reads its value."""
