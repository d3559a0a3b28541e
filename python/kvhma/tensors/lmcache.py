# SPDX-License-Identifier: Apache-2.0
"""LMCache's memory objects as blocks. LMCache is not imported.

memory   |    object of 256 tokens      |pad| object of 88 |pad|
         |K: layer 0|layer 1|..|V: ..   |   |K: ..  |V: .. |
         ^ block 0                            ^ block 50        each multiple of the alignment begins a block
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from kvhma.errors import GeometryError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Shard
from kvhma.tensors.regions import locate

_PARTS = {"KV_2LTD": ("k", "v"), "KV_MLA_FMT": ("kv",)}
"""Parts of a format in the order of an object; each has the layers, then the tokens, then the content."""


def geometry_of_objects(
    memory: torch.Tensor,
    like: Any,
    *,
    heads: Shard | None = None,
    layers: Iterable[int] | None = None,
    layer_name: Callable[[int], str] = "layers.{}".format,
    align: int = 4096,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> Geometry:
    """Describe the memory of an LMCache allocator as blocks with the shape of one of its objects.

    A block has all tokens of an object, so full and partial chunks have separate geometries. A block may begin at each
    multiple of `align`, so blocks share bytes; :func:`block_ids` has those of objects. Count a request's tokens from
    the first token of the objects that it moves, which must begin a page of the engine. Parts have the names of
    :meth:`kvhma.Geometry.by_parts`.

    Args:
        memory: the allocator's buffer, uint8 of one dimension.
        like: a memory object, of format ``KV_2LTD`` or ``KV_MLA_FMT``.
        heads: the KV heads of this rank among those of all ranks, for ``KV_2LTD`` only.
        layers: the number of each layer in the model; None for 0, 1, ...
        layer_name: the name of a layer from its number.
        align: a divisor of all distances of objects, in bytes: the allocator's alignment.
        tp_rank: number of this rank.
        tp_size: ranks of the engine.

    Returns:
        The geometry of this rank, with one group and no null block.

    Raises:
        GeometryError: another format, several tensors in an object, other memory, or numbers that do not fit its shape.
    """
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or align < 1:
        found = f"{memory.dtype} {tuple(memory.shape)} of strides {memory.stride()}, align {align}"
        raise GeometryError(f"memory: {found}; it is the flat uint8 buffer of an allocator")
    meta = like.metadata
    names, shape = _PARTS.get(meta.fmt.name), tuple(meta.shape)
    if names is None or len(shape) != 4 or shape[0] != len(names) or len(meta.shapes or ()) > 1:
        raise GeometryError(f"object: {meta.fmt.name} {meta.shapes or shape}; known are {', '.join(_PARTS)}")
    _, num_layers, tokens, width = shape
    numbers = list(range(num_layers) if layers is None else layers)
    if len(numbers) != num_layers:
        raise GeometryError(f"layers {numbers}: the object has {num_layers}")
    if (heads is None) != (len(names) == 1) or (heads is not None and (heads.problem("heads") or width % heads.held)):
        raise GeometryError(f"heads is {heads}, and the object is {meta.fmt.name} of {width} items a token")
    item = meta.dtype.itemsize
    row = width * item
    content = width if heads is None else width // heads.held
    axes: tuple[Axis, ...] = (Axis("tokens", tokens, row), Axis("content", content, item))
    if heads is not None:
        axes = (Axis("heads", heads.extent, content * item, heads.start, heads.held), *axes)
    regions, places = locate({"memory": memory})
    num_blocks = (memory.numel() - len(names) * num_layers * tokens * row) // align + 1
    dtype = str(meta.dtype).removeprefix("torch.")
    described = []
    for at, name in enumerate(names):
        page = Page((Part(name, dtype, item, 0, axes),))
        for index, number in enumerate(numbers):
            offset = places["memory"].offset + (at * num_layers + index) * tokens * row
            described.append(Layer(f"{layer_name(number)}.{name}", 0, 0, offset, num_blocks, align, page))
    group = Group("full" if heads is not None else "mla", tokens)
    return Geometry(regions, (group,), tuple(described), tp_rank, tp_size, null_block=None)


def block_ids(store: Geometry, objects: Iterable[Any]) -> list[int]:
    """Return the block ids of memory objects by their place in memory.

    The number in ``metadata.address`` depends on the allocator: bytes, or pages of a ``PagedTensorMemoryAllocator``.

    Args:
        store: from :func:`geometry_of_objects`, with an object of the same shape.
        objects: memory objects, in the order of a request's tokens.

    Raises:
        GeometryError: an object with other tokens, or one that begins between two blocks.
    """
    start, align = store.regions[0].base + store.layers[0].offset, store.layers[0].block_stride
    tokens, ids = store.groups[0].block_size, []
    for chunk in objects:
        at, shape = chunk.data_ptr - start, tuple(chunk.metadata.shape)
        if at % align or at < 0 or shape[2] != tokens:
            raise GeometryError(f"object: {shape} at byte {at}; blocks have {tokens} tokens, {align} bytes apart")
        ids.append(at // align)
    return ids
