# SPDX-License-Identifier: Apache-2.0
"""Specs of the models of the table, grouped as vLLM's hybrid allocator groups them."""

from __future__ import annotations

from typing import Literal, cast

import torch

from kvhma.geometry import Axis, Group, Page
from kvhma.hybrid import ConvOrder, KVForm, LayoutError, layout
from kvhma.models import Model
from kvhma.torch.attention import AttentionKind, AttentionSpec, MLASpec
from kvhma.torch.plots import Spec
from kvhma.torch.shard import Shard
from kvhma.torch.state import ConvPart, StateSpec


def model_specs(
    model: Model,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    block_size: int = 16,
    kernel_block: int | Literal["flashinfer"] | None = None,
    align: int | None = None,
    kv: KVForm = "packed",
    view: str | None = None,
    conv: ConvOrder = "DS",
    speculative: int = 0,
) -> tuple[dict[str, Spec], ...]:
    """Return what every layer of one rank caches, by group, as :func:`allocate` takes it.

    Groups, block size, shards and padding are those of :func:`kvhma.hybrid.layout`, which also has the arguments
    that are not explained here.

    Args:
        model: the model.
        tp_rank: place among the tensor-parallel ranks.
        tp_size: tensor-parallel ranks.
        block_size: tokens per block that the user asked for; state can make it longer.
        kernel_block: tokens that the attention kernel addresses as one block.
        align: tokens a block that holds a state is a multiple of.
        kv: how K and V lie; MLA has only ``"packed"``.
        view: order of the dimensions of attention views; None for that of `kv`.
        conv: how channels and rows of the convolution state lie.
        speculative: extra state slots behind the state-bearing one.

    Raises:
        LayoutError: a combination the allocator cannot make; the text names the field and its value.
    """
    geometry = layout(
        model,
        num_blocks=1,
        tp_rank=tp_rank,
        tp_size=tp_size,
        block_size=block_size,
        kernel_block=kernel_block,
        align=align,
        # What lies apart is laid out here; to the hybrid allocator only the sizes matter.
        kv="packed" if kv == "packed" else "split",
        conv=conv,
        speculative=speculative,
    )
    groups: list[dict[str, Spec]] = [{} for _ in geometry.groups]
    for layer in geometry.layers:
        group = geometry.groups[layer.group]
        content = layer.page.nbytes * group.ratio
        padded = None if layer.block_stride == content else layer.block_stride
        if group.kind == "ssm":
            spec: Spec = _state_spec(model, layer.page, group, conv, padded)
        else:
            spec = _token_spec(model, layer.page, group, kv, view, padded)
        groups[layer.group][layer.name] = spec
    return tuple(groups)


def _token_spec(model: Model, page: Page, group: Group, kv: KVForm, view: str | None, padded: int | None) -> Spec:
    dtype, kernel = _dtype(model.dtype), group.kernel_block_size
    axes = {axis.name: axis for axis in page.parts[0].axes}
    if group.kind == "mla":
        return MLASpec(model.head_dim, dtype, group.block_size, kernel, view, padded)
    return AttentionSpec(
        heads=_shard(axes["heads"]),
        head_dim=model.head_dim,
        dtype=dtype,
        block_size=group.block_size,
        kernel_block=kernel,
        kind=cast("AttentionKind", group.kind),
        window=group.window,
        chunk=group.chunk,
        kv=kv,
        view=view,
        page_bytes=padded,
    )


def _state_spec(model: Model, page: Page, group: Group, conv: ConvOrder, padded: int | None) -> Spec:
    if model.state is None:
        raise LayoutError(f"{model.name}: a group of state, but state is None")
    parts = {part.name: {axis.name: axis for axis in part.axes} for part in page.parts}
    return StateSpec(
        conv=tuple(ConvPart(name, _shard(axes["channels"])) for name, axes in parts.items() if name != "ssm"),
        conv_rows=model.state.d_conv - 1,
        conv_dtype=_dtype(model.state.conv_dtype),
        ssm_heads=_shard(parts["ssm"]["heads"]),
        ssm_shape=(model.state.head_dim, model.state.d_state),
        ssm_dtype=_dtype(model.state.ssm_dtype),
        conv_order=conv,
        block_size=group.block_size,
        speculative=group.speculative,
        page_bytes=padded,
    )


def _shard(axis: Axis) -> Shard:
    return Shard(axis.extent, axis.start, axis.length)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"dtype {name!r} is none of torch's")
    return dtype
