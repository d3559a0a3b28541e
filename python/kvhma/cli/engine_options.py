# SPDX-License-Identifier: Apache-2.0
"""How one engine is described on the command line: ``tp=2,block=16,kernel=flashinfer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
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
DTYPES = {
    "auto": None,
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    **{name: name for name in ("bfloat16", "float16", "float32", "float8_e4m3fn")},
}
"""Dtypes by their names on the command line; `auto` is the dtype of the checkpoint or architecture, as in vLLM."""

_ORDERS: dict[str, str] = {"HND": "LBHNC", "NHD": "LBNHC", **{order: order for order in get_args(Order)}}
"""Stride orders by name; names of attention kernels mean what they mean in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(LayoutOptions):
    """One engine: the options that its ranks share, and dtypes in place of the model's.

    Attributes:
        kv_dtype: dtype of the KV cache; None for the model's.
        ssm_dtype: dtype of the recurrent state; None for the model's.
        dp_size: number of such engines, which share the requests. A request runs on one of them.
        dcp_size: decode-context-parallel ranks. Only 1 can be laid out here.
    """

    num_blocks: int = 2
    kernel_block: KernelBlock = "flashinfer"
    kv_dtype: str | None = None
    ssm_dtype: str | None = None
    dp_size: int = 1
    dcp_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of all pipeline stages."""
        return self.tp_size * self.pp_size

    def model(self, model: Model) -> Model:
        """Return the model as this engine caches it: with its dtypes, and a row of convolution for each draft token."""
        if self.kv_dtype:
            model = replace(model, dtype=self.kv_dtype)
        if model.state is not None:
            # vLLM has no such row for Mamba1.
            drafts = 0 if model.state.kind == "mamba1" else self.speculative
            state = replace(model.state, draft_rows=drafts, ssm_dtype=self.ssm_dtype or model.state.ssm_dtype)
            model = replace(model, state=state)
        return model

    def rank(self, model: Model, rank: int, num_blocks: int, base: int, kernel: int | None = None) -> Geometry:
        """Return the geometry of one rank; `kernel` replaces the engine's own kernel block.

        Ranks are numbered as in vLLM: first those of the first pipeline stage, then those of the next.

        Raises:
            KvhmaError: the model cannot be laid out so.
        """
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        options = replace(
            self,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            num_blocks=num_blocks,
            base=base,
            kernel_block=kernel or self.kernel_block,
        )
        return layout(self.model(model), options)

    def ranks(self, model: Model, num_blocks: int, base: int, step: int, kernel: int | None = None) -> list[Geometry]:
        """Return the geometries of all ranks, `step` bytes apart. Errors as for `rank`."""
        return [self.rank(model, rank, num_blocks, base + rank * step, kernel) for rank in range(self.num_ranks)]


def parse_engine(ctx: click.Context, param: click.Parameter, text: str) -> EngineOptions:
    """Parse an option's value; errors name the item and its value.

    Raises:
        click.BadParameter: an unknown key, a repeated key, or a value out of range.
    """
    return _engine(ctx, param, {field: _value(ctx, param, *found) for field, found in _items(ctx, param, text)})


def _items(ctx: click.Context, param: click.Parameter, text: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the field, the key and the text of the value of every given item."""
    fields = set()
    for item in (word.strip() for word in text.split(",")):
        if not item:
            raise click.BadParameter(f"{text!a} has an empty item", ctx, param)
        key, equals, value = item.partition("=")
        key = key.strip().lower().replace("-", "_")
        key = _LONG_KEYS.get(key, key)
        if not equals or key not in KEYS:
            expected = f"expected key=value with a key of {', '.join(KEYS)}{_meant(key)}"
            raise click.BadParameter(f"{item!a}: {expected}", ctx, param)
        if (field := KEYS[key][0]) in fields:
            raise click.BadParameter(f"{key} is given twice", ctx, param)
        fields.add(field)
        yield field, (key, value)


def _meant(key: str) -> str:
    """Ask for the key that was probably meant: the same letters in another order, or else similar ones."""
    known = (*KEYS, *_LONG_KEYS)
    swapped = [name for name in known if sorted(name) == sorted(key)]
    near = swapped or get_close_matches(key[:40], known, 1, 0.7)
    return f". Did you mean {near[0]}?" if near else ""


def _engine(ctx: click.Context, param: click.Parameter, values: dict[str, Any]) -> EngineOptions:
    engine = EngineOptions(**values)
    if engine.num_ranks > MAX_RANKS:
        sizes = f"tp={engine.tp_size} and pp={engine.pp_size}"
        raise click.BadParameter(f"{sizes}: {engine.num_ranks} ranks, at most {MAX_RANKS}", ctx, param)
    return engine


def _value(ctx: click.Context, param: click.Parameter, key: str, text: str) -> Any:
    try:
        return KEYS[key][1](text.strip())
    except ValueError as error:
        raise click.BadParameter(f"{key}={text}: {error}", ctx, param) from error


def within(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of integers in a range."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdecimal() or not text.isascii():
            raise ValueError("must be an integer")
        if len(text) > 18 or not low <= int(text) <= high:
            raise ValueError(f"must be {low} to {high}")
        return int(text)

    return parse


def _order(text: str) -> str:
    if text.upper() not in _ORDERS:
        raise ValueError(f"must be one of {', '.join(_ORDERS)}")
    return _ORDERS[text.upper()]


def _conv(text: str) -> str:
    if text.upper() not in (known := get_args(ConvOrder)):
        raise ValueError(f"must be one of {', '.join(known)}")
    return text.upper()


def dtype(text: str) -> str | None:
    """Parse the name of a dtype, long or short, in any case; None for ``auto``.

    Raises:
        ValueError: it is not known.
    """
    if text.lower() not in DTYPES:
        raise ValueError(
            f"must be one of {', '.join(DTYPES)}. Caches with scales or packed numbers, such as int8_per_token_head "
            "and nvfp4, cannot be planned: docs/formats.md says which of them the connector reads"
        )
    return DTYPES[text.lower()]


def _kernel(text: str) -> KernelBlock:
    if text.lower() == "flashinfer":
        return "flashinfer"
    return None if text.lower() == "logical" else within(1, _MAX_BLOCK)(text)


def _no_context_parallel(text: str) -> int:
    if within(1, MAX_RANKS)(text) > 1:
        raise ValueError(
            "must be 1: the ranks of a context-parallel engine cannot be laid out here. The connector transfers "
            "between them, and `kvhma export` writes the geometries of live ones, for --local and --remote"
        )
    return 1


KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "tp": ("tp_size", within(1, MAX_RANKS)),
    "pp": ("pp_size", within(1, MAX_RANKS)),
    "dp": ("dp_size", within(1, MAX_RANKS)),
    "dcp": ("dcp_size", _no_context_parallel),
    "block": ("block_size", within(1, _MAX_BLOCK)),
    "kernel": ("kernel_block", _kernel),
    "kv": ("kv_dtype", dtype),
    "ssm": ("ssm_dtype", dtype),
    "layout": ("order", _order),
    "conv": ("conv", _conv),
    "spec": ("speculative", within(0, 64)),
}
"""Keys of an engine: the field that each sets, and the parser of its value."""

_LONG_KEYS = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "decode_context_parallel_size": "dcp",
    "block_size": "block",
    "kv_cache_dtype": "kv",
    "kv_dtype": "kv",
    "mamba_ssm_cache_dtype": "ssm",
    "ssm_dtype": "ssm",
    "kv_cache_layout": "layout",
    "num_speculative_tokens": "spec",
}
"""The names of the same keys as options of vLLM."""
