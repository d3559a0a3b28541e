# SPDX-License-Identifier: Apache-2.0
"""Buffers and the layers' bytes in them, in the few numbers that a mover of whole blocks and heads needs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvhma.geometry import Memory
from kvhma.torch.placement import BufferKind, LayerPlacement
from kvhma.torch.specs import Spec, StateSpec, TokenSpec


@dataclass(frozen=True, slots=True)
class TensorReference:
    """One physical buffer.

    Attributes:
        base: address.
        nbytes: length.
        memory: ``"DRAM"`` or ``"VRAM"``.
        device: device id.
        kind: layout of a block's bytes in it.
        page_bytes: bytes of one layer in a logical block, including padding.
        layers: for each slot the layers that share it.
    """

    base: int
    nbytes: int
    memory: Memory
    device: int
    kind: BufferKind
    page_bytes: int
    layers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of a layer in one of its blocks, without padding.

    Attributes:
        offset: bytes from the buffer's start to the bytes in block 0.
        nbytes: bytes of content in a block.
        heads: number of heads that can be read separately; a head has ``nbytes / heads`` bytes. 1 if they cannot be.
        head_stride: bytes from one head to the next. None if heads cannot be read separately; then the bytes are
            contiguous.
    """

    offset: int
    nbytes: int
    heads: int = 1
    head_stride: int | None = None


@dataclass(frozen=True, slots=True)
class DataReference:
    """Where one layer's bytes are.

    Attributes:
        layer: its name.
        tensor: index of the buffer.
        num_blocks: number of blocks; of kernel blocks if they are smaller.
        block_stride: bytes from one such block to the next.
        segments: the content of a block.
    """

    layer: str
    tensor: int
    num_blocks: int
    block_stride: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class References:
    """All buffers, and for each group its layers' bytes.

    Attributes:
        tensors: the buffers.
        groups: for each KV cache group a reference for each of its layers.
    """

    tensors: tuple[TensorReference, ...]
    groups: tuple[tuple[DataReference, ...], ...]

    def to_json(self, *, indent: int | None = None) -> bytes:
        """Return the references as UTF-8 JSON; fields have the names of the attributes.

        Args:
            indent: spaces for each level; None for one line.
        """
        return json.dumps({"kvhma_references": 1, **asdict(self)}, indent=indent).encode()


def data_reference(name: str, spec: Spec, placement: LayerPlacement, num_blocks: int) -> DataReference:
    """Return where one layer's bytes are.

    A block of state has one segment for the convolution and one for the heads::

        start                    start + conv_bytes
        | convolution            | head 0      | head 1      | ... | padding
                                 |<-head_bytes>|
    """
    buffer, start, strides = placement.buffer, placement.offset, placement.strides
    if isinstance(spec, TokenSpec):
        return DataReference(name, buffer, num_blocks * spec.ratio, strides["K"], _token_segments(spec, placement))
    if not isinstance(spec, StateSpec):
        return DataReference(name, buffer, num_blocks, strides["B"], (Segment(start, spec.nbytes),))
    segments: tuple[Segment, ...] = (Segment(start, spec.conv_bytes),) if spec.conv else ()
    if spec.ssm_heads is not None:
        heads = spec.ssm_heads.held
        segments += (Segment(start + spec.conv_bytes, heads * spec.head_bytes, heads, spec.head_bytes),)
    return DataReference(name, buffer, num_blocks, strides["B"], segments)


def _token_segments(spec: TokenSpec, placement: LayerPlacement) -> tuple[Segment, ...]:
    """Return the bytes of a kernel block: one segment, or separate segments for K and V if they do not touch.

    ::

        BHLNC, split    | K of head 0, V of head 0 | K of head 1, V of head 1 | ...   one segment of heads
        LBHNC, split    | K of head 0 | K of head 1 .. | V of head 0 | ..             two segments of heads
        LBNHC, split    | K of all heads | V of all heads |                           one segment, no single heads
        LBNHC, apart    | K of all heads |    ...    | V of all heads |               two segments, no single heads
    """
    sizes, strides, whole = spec.sizes, placement.strides, spec.nbytes // spec.ratio
    k_to_v = strides.get("S", 0)
    if sizes["H"] > 1 and strides["H"] >= strides["N"]:
        heads, head_stride, together = sizes["H"], strides["H"], k_to_v < strides["H"]
    else:
        # No head is contiguous by itself, or there is only one. The tokens are dense, but V may be far from K.
        heads, head_stride, together = 1, None, 2 * k_to_v in (0, whole)
    starts = [placement.offset] if together else [placement.offset, placement.offset + k_to_v]
    return tuple(Segment(start, whole // len(starts), heads, head_stride) for start in starts)
