# SPDX-License-Identifier: Apache-2.0
"""Specs of the models in the table, with the groups of vLLM's hybrid allocator."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import cast

import torch

from kvhma.errors import LayoutError
from kvhma.geometry import Group, Page
from kvhma.models import Attention, Model, State
from kvhma.models.pages import ConvOrder
from kvhma.models.stride_orders import KVForm
from kvhma.models.vllm_layout import AllocatorOptions, LayoutOptions, layout
from kvhma.torch.specs import AttentionKind, AttentionSpec, ConvPart, MLASpec, Spec, StateSpec, TokenSpec


def model_specs(
    model: Model, options: AllocatorOptions | None = None, *, kv: KVForm = "packed", dim_order: str | None = None
) -> tuple[dict[str, Spec], ...]:
    """Return the specs of every layer of one rank, by group, as :func:`allocate` takes them.

    Groups, block size, shards and padding are those of :func:`kvhma.models.vllm_layout.layout`.

    Args:
        model: the model.
        options: how an engine's allocator cuts it; None for the defaults.
        kv: where K and V are; MLA allows only ``"packed"``.
        dim_order: order of the dimensions of attention views; None for that of `kv`.

    Raises:
        LayoutError: a combination that the allocator cannot make; the text names the field and its value.
    """
    # `allocate` decides where K and V are; the hybrid layout only gives sizes.
    sizes_as: KVForm = "packed" if kv == "packed" else "split"
    options = options or AllocatorOptions()
    geometry = layout(model, LayoutOptions(num_blocks=1, kv=sizes_as, **asdict(options)))
    caches = dict(model.specs())
    groups: list[dict[str, Spec]] = [{} for _ in geometry.groups]
    for layer in geometry.layers:
        group = geometry.groups[layer.group]
        padded = None if layer.block_stride == layer.page.nbytes * group.ratio else layer.block_stride
        cache = caches[layer.name]
        if isinstance(cache, Attention):
            spec: StateSpec | TokenSpec = _token_spec(cache, layer.page, group, kv, dim_order)
        else:
            spec = _state_spec(cache, layer.page, group, options.conv)
        groups[layer.group][layer.name] = replace(spec, page_bytes=padded)
    return tuple(groups)


def _token_spec(cache: Attention, page: Page, group: Group, kv: KVForm, dim_order: str | None) -> TokenSpec:
    if cache.dtype is None or cache.v_head_dim is not None:
        raise LayoutError(f"{cache.kind} attention, v_head_dim {cache.v_head_dim}: kvhma.torch has no spec for it")
    dtype = _dtype(cache.dtype)
    if cache.kind == "mla":
        return MLASpec(cache.head_dim, dtype, group.block_size, group.kernel_block_size, dim_order)
    return AttentionSpec(
        heads=next(axis.shard for axis in page.parts[0].axes if axis.name == "heads"),
        head_dim=cache.head_dim,
        dtype=dtype,
        block_size=group.block_size,
        kernel_block=group.kernel_block_size,
        kind=cast("AttentionKind", group.kind),
        window=group.window,
        chunk=group.chunk,
        kv=kv,
        dim_order=dim_order,
    )


def _state_spec(state: State, page: Page, group: Group, conv: ConvOrder) -> StateSpec:
    shards = {part.name: {axis.name: axis.shard for axis in part.axes} for part in page.parts}
    return StateSpec(
        conv=tuple(ConvPart(name, axes["channels"]) for name, axes in shards.items() if name != "ssm"),
        conv_rows=state.d_conv - 1 + state.draft_rows,
        conv_dtype=_dtype(state.conv_dtype),
        ssm_heads=shards["ssm"]["heads"] if state.is_recurrent else None,
        ssm_shape=(state.head_dim, state.d_state),
        ssm_dtype=_dtype(state.ssm_dtype),
        conv_order=conv,
        block_size=group.block_size,
        speculative=group.speculative,
    )


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
