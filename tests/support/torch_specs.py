# SPDX-License-Identifier: Apache-2.0
"""Generated mixes of specs, small enough to label every byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from hypothesis import strategies as st

from kvhma.geometry import Shard
from kvhma.models.stride_orders import Order
from kvhma.torch import AttentionSpec, ConvPart, MLASpec, OpaqueSpec, Spec, StateSpec

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = get_args(Order)
PAGE_ALIGN = 16
"""Every dtype's items fit it, and so do half pages."""


@dataclass(frozen=True)
class Mix:
    """What to allocate."""

    groups: tuple[dict[str, Spec], ...]
    num_blocks: int
    layout: str
    shared: tuple[tuple[str, ...], ...] | None

    @property
    def specs(self) -> dict[str, Spec]:
        return {name: spec for group in self.groups for name, spec in group.items()}

    def strict(self) -> bool:
        """Whether pages are contiguous in it, so that all its layers can share memory."""
        specs = [spec for spec in self.specs.values() if isinstance(spec, AttentionSpec)]
        return self.layout != "LHBNC" and all(spec.kv != "apart" for spec in specs)


def shards(most: int) -> st.SearchStrategy[Shard]:
    def within(bounds: tuple[int, int, int]) -> Shard:
        start, length, rest = bounds
        return Shard(start + length + rest, start, length)

    return st.tuples(st.integers(0, 2), st.integers(1, most), st.integers(0, 2)).map(within)


@st.composite
def attention(draw: Any) -> AttentionSpec:
    kernel, ratio = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    kv = draw(st.sampled_from(["packed", "packed", "split", "apart"]))
    letters = "BHNC" if kv == "packed" else "BSHNC"
    kind = draw(st.sampled_from(["full", "sliding", "chunked"]))
    return AttentionSpec(
        heads=draw(shards(4)),
        head_dim=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(DTYPES)),
        block_size=kernel * ratio,
        kernel_block=kernel,
        kind=kind,
        window=5 if kind == "sliding" else None,
        chunk=6 if kind == "chunked" else None,
        kv=kv,
        dim_order=draw(st.one_of(st.none(), st.permutations(letters).map("".join))),
    )


@st.composite
def mla(draw: Any) -> MLASpec:
    kernel, ratio = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    dim_order = draw(st.sampled_from([None, "BNC", "BHNC", "NBC"]))
    return MLASpec(draw(st.integers(1, 5)), draw(st.sampled_from(DTYPES)), kernel * ratio, kernel, dim_order)


@st.composite
def state(draw: Any) -> StateSpec:
    names = draw(st.sampled_from([(), ("x",), ("x", "B", "C"), ("q", "k", "v")]))
    conv = tuple(ConvPart(name, draw(shards(4))) for name in names)
    wide = draw(st.sampled_from(DTYPES))
    heads = draw(shards(3)) if not conv or draw(st.booleans()) else None
    conv_dtype = wide if draw(st.booleans()) else torch.float32  # 4 bytes are a multiple of every other item
    return StateSpec(
        conv=conv,
        conv_rows=draw(st.integers(1, 4)),
        conv_dtype=conv_dtype,
        ssm_heads=heads,
        ssm_shape=tuple(draw(st.lists(st.integers(1, 3), max_size=2))),
        ssm_dtype=wide,
        conv_order=draw(st.sampled_from(["DS", "SD"])),
    )


def opaque() -> st.SearchStrategy[OpaqueSpec]:
    return st.integers(1, 40).map(OpaqueSpec)


@st.composite
def mixes(draw: Any) -> Mix:
    layout = draw(st.sampled_from(LAYOUTS))
    pool = draw(st.lists(st.one_of(attention(), attention(), mla(), state(), opaque()), min_size=1, max_size=4))
    if draw(st.booleans()):
        pool = _equal_pages(pool, layout)
    groups = []
    for index, spec in enumerate(pool):
        names = [f"{index}.{layer}" for layer in range(draw(st.integers(1, 3)))]
        groups.append(dict.fromkeys(names, spec))
        if isinstance(spec, AttentionSpec) and draw(st.booleans()):
            groups[-1][names[-1]] = _other_heads(spec)
    return Mix(tuple(groups), draw(st.integers(1, 6)), layout, None)


def _other_heads(spec: AttentionSpec) -> AttentionSpec:
    """Return a layer with other heads for the same group: in the same padded page, if it fits."""
    other = replace(spec, head_dim=spec.head_dim % 3 + 1, page_bytes=None)
    if spec.page_bytes is not None and other.nbytes <= spec.page_bytes:
        return replace(other, page_bytes=spec.page_bytes)
    return other


def _equal_pages(pool: list[Spec], layout: str) -> list[Spec]:
    """Pad what can be padded to one size, so that it shares memory."""
    able = [
        not isinstance(spec, OpaqueSpec)
        and (isinstance(spec, StateSpec) or (spec.ratio == 1 and spec.kv != "apart" and layout != "LHBNC"))
        for spec in pool
    ]
    most = max([spec.nbytes for spec, can in zip(pool, able, strict=True) if can], default=1)
    page = -(-most // PAGE_ALIGN) * PAGE_ALIGN
    return [
        replace(spec, page_bytes=page) if can and not isinstance(spec, OpaqueSpec) else spec
        for spec, can in zip(pool, able, strict=True)
    ]
