# SPDX-License-Identifier: Apache-2.0
"""Buffers and the bytes of layers in them, in the few numbers that a mover of whole blocks and heads needs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvhma.geometry import Memory
from kvhma.torch.arrange import BufferKind
from kvhma.torch.attention import AttentionSpec, MLASpec
from kvhma.torch.plots import Plot, Spec, TokenSpec
from kvhma.torch.state import StateSpec


@dataclass(frozen=True, slots=True)
class TensorReference:
    """One physical buffer.

    Attributes:
        base: address.
        nbytes: length.
        memory: ``"DRAM"`` or ``"VRAM"``.
        device: device id.
        kind: how the bytes of a block lie in it.
        page_bytes: bytes of one layer in a logical block, padding included.
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
class Chunk:
    """Bytes of a layer in one of its blocks, padding excluded.

    Attributes:
        offset: bytes from the buffer's start to those of block 0.
        nbytes: bytes of content in a block.
        heads: heads that can be taken apart; ``nbytes / heads`` is one of them. 1 where they cannot be.
        head_stride: bytes from one head to the next; None where heads cannot be taken apart, then the bytes are
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
        num_blocks: blocks, kernel blocks where they are smaller.
        block_stride: bytes from one of them to the next.
        chunks: what a block of it holds.
    """

    layer: str
    tensor: int
    num_blocks: int
    block_stride: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class References:
    """All buffers, and for each group its layers' bytes."""

    tensors: tuple[TensorReference, ...]
    groups: tuple[tuple[DataReference, ...], ...]

    def to_json(self, *, indent: int | None = None) -> bytes:
        """Return the same as UTF-8 JSON; fields have the names of the attributes."""
        return json.dumps({"kvhma_references": 1, **asdict(self)}, indent=indent).encode()


def data_reference(name: str, spec: Spec, plot: Plot, num_blocks: int) -> DataReference:
    """Return where one layer's bytes are."""
    if isinstance(spec, AttentionSpec | MLASpec):
        chunks = _token_chunks(spec, plot)
        return DataReference(name, plot.buffer, num_blocks * spec.ratio, plot.strides["K"], chunks)
    if not isinstance(spec, StateSpec):
        return DataReference(name, plot.buffer, num_blocks, plot.strides["B"], (Chunk(plot.offset, spec.nbytes),))
    chunks = (Chunk(plot.offset, spec.conv_bytes),) if spec.conv else ()
    if spec.ssm_heads is not None:
        at, heads = plot.offset + spec.conv_bytes, spec.ssm_heads.held
        chunks += (Chunk(at, heads * spec.head_bytes, heads, spec.head_bytes),)
    return DataReference(name, plot.buffer, num_blocks, plot.strides["B"], chunks)


def _token_chunks(spec: TokenSpec, plot: Plot) -> tuple[Chunk, ...]:
    sizes, strides, whole = spec.sizes, plot.strides, spec.nbytes // spec.ratio
    halves = [plot.offset + at * strides["S"] for at in range(sizes["S"])]
    if sizes["H"] == 1 or strides["H"] < strides["N"]:
        # No head can be taken out of these tokens. They are dense, but V may lie far from K.
        if len(halves) == 1 or 2 * strides["S"] == whole:
            return (Chunk(plot.offset, whole),)
        return tuple(Chunk(at, whole // 2) for at in halves)
    if len(halves) == 1 or strides["S"] < strides["H"]:
        return (Chunk(plot.offset, whole, sizes["H"], strides["H"]),)
    return tuple(Chunk(at, whole // 2, sizes["H"], strides["H"]) for at in halves)
