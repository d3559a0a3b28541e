# SPDX-License-Identifier: Apache-2.0
"""SGLang's pools of token slots as a geometry. SGLang is not imported; only its allocated tensors are read.

pool.k_buffer[layer]   | page 0: for dummies | page 1                  | ...
                                             | slot 16 | slot 17 | ... |        page_size 16
                                             | head 0: channels | head 1 | ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvhma.errors import GeometryError
from kvhma.geometry import Geometry, Group, Shard
from kvhma.tensors.geometry import LayerTensors, RankOptions, TensorPart, geometry_from_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MHA, _MLA, _SWA = "MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool"


class _Pool(NamedTuple):
    """A pool of one group.

    Attributes:
        layers: index of the layer in the pool, by its number in the model.
        pool: SGLang's pool.
    """

    layers: Mapping[int, int]
    pool: Any


def geometry_of_pool(
    pool: Any, *, heads: Shard | None = None, sliding_window_size: int | None = None, **rank: Unpack[RankOptions]
) -> Geometry:
    """Describe a pool of SGLang: of MHA or MLA, or both sorts of layers of a model with sliding windows.

    A block is a page of ``page_size`` slots, and a block id is a page number: the slot divided by ``page_size``. K and
    V of a layer are separate allocations, so each is a layer here: ``layers.7.k`` and ``layers.7.v``, or
    ``layers.7.kv`` for a latent. The first group of an ``SWAKVPool`` is full attention. The second has the windows,
    whose pages belong to a separate pool.

    Args:
        pool: an ``MHATokenToKVPool``, ``MLATokenToKVPool``, or an ``SWAKVPool`` of two ``MHATokenToKVPool``.
        heads: the KV heads of this rank among those of all ranks; None if it holds all.
        sliding_window_size: SGLang's ``ModelRunner.sliding_window_size``, for an ``SWAKVPool`` only: the tokens that a
            query of a sliding layer sees before itself. The window of the geometry has one token more.
        **rank: as for :func:`geometry_from_tensors`.

    Returns:
        The geometry of this rank.

    Raises:
        GeometryError: another class, including subclasses, which may store other bytes; a cache layout other than
            ``nhd``; a quantized cache; slots that are not whole pages. Or the pool does not know which layers of the
            model it has. Or the window is missing, or given for another class.
    """
    name = _class_of(pool)
    if (name == _SWA) != (sliding_window_size is not None):
        raise GeometryError(
            f"sliding_window_size is {sliding_window_size}, and the pool is a {name}: "
            f"it is for a {_SWA}, which needs it"
        )
    page_size = int(pool.page_size)
    if sliding_window_size is not None:
        groups = [Group("full", page_size), Group("sliding", page_size, window=sliding_window_size + 1)]
        mapping: Mapping[int, tuple[int, bool]] = pool.layers_mapping
        of_group = [
            {layer: at for layer, (at, sliding) in mapping.items() if sliding is wanted} for wanted in (False, True)
        ]
        pools = [_Pool(of_group[0], pool.full_kv_pool), _Pool(of_group[1], pool.swa_kv_pool)]
    else:
        groups = [Group("mla" if name == _MLA else "full", page_size)]
        pools = [_Pool(_layers_of_model(pool, name), pool)]
    layers = {
        layer: LayerTensors(index, (part,))
        for index, group_pool in enumerate(pools)
        for layer, part in _layers(group_pool, page_size, heads)
    }
    return geometry_from_tensors(groups, layers, **rank)


def _class_of(pool: Any) -> str:
    """Return the name of a known class, checked by name and module."""
    kind = type(pool)
    if not kind.__module__.startswith("sglang.srt.mem_cache.") or kind.__name__ not in (_MHA, _MLA, _SWA):
        raise GeometryError(f"{kind.__module__}.{kind.__name__}: known are SGLang's {_MHA}, {_MLA} and {_SWA}")
    return kind.__name__


def _layers_of_model(pool: Any, name: str) -> dict[int, int]:
    """Return the index of each layer in a pool, by its number in the model.

    A hybrid pool writes these numbers into an MHA pool that it contains, but not into an MLA pool, which then counts
    from 0. Only an engine's own MLA pool is built with ``end_layer``, one past its last layer.
    """
    numbers = getattr(pool, "model_layer_ids", ())
    if len(numbers) != pool.layer_num:
        raise GeometryError(f"{name}: layer_num is {pool.layer_num}, model_layer_ids {numbers}")
    if name == _MLA and pool.end_layer - pool.start_layer != pool.layer_num:
        raise GeometryError(
            f"{name}: layer_num is {pool.layer_num}, start_layer {pool.start_layer}, end_layer {pool.end_layer}: "
            "it does not know which layers of the model it has, as within a HybridLinearKVPool"
        )
    return {int(number): at for at, number in enumerate(numbers)}


def _layers(group_pool: _Pool, page_size: int, heads: Shard | None) -> Iterator[tuple[str, TensorPart]]:
    """Yield name and view of each layer of a pool."""
    pool, name = group_pool.pool, _class_of(group_pool.pool)
    if name == _SWA:
        raise GeometryError(f"an {_SWA} in an {_SWA}")
    if pool.dtype != pool.store_dtype:
        raise GeometryError(f"{name}: dtype {pool.dtype} is stored as {pool.store_dtype}, whose encoding is unknown")
    if name == _MLA:
        if getattr(pool, "use_dsa", False):
            raise GeometryError(f"{name}: use_dsa, whose index is in the same bytes")
        for layer, at in group_pool.layers.items():
            latent = _pages(f"layers.{layer}.kv", pool.kv_buffer[at], page_size)[:, :, 0]
            yield f"layers.{layer}.kv", TensorPart("kv", latent, ("blocks", "tokens", "content"))
        return
    if pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
        raise GeometryError(f"{name}: kv_cache_layout {pool.kv_cache_layout!r}, quantized {pool.is_quantized_kv_cache}")
    shards = {} if heads is None else {"heads": heads}
    for layer, at in group_pool.layers.items():
        for part, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
            view = _pages(f"layers.{layer}.{part}", buffers[at], page_size)
            yield f"layers.{layer}.{part}", TensorPart(part, view, ("blocks", "tokens", "heads", "content"), shards)


def _pages(name: str, buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return slots ``(n, heads, channels)`` as pages ``(n / page_size, page_size, heads, channels)``."""
    if buffer.dim() != 3 or len(buffer) % page_size:
        raise GeometryError(
            f"{name}: shape {tuple(buffer.shape)} is not (slots, heads, channels) of pages of {page_size}"
        )
    return buffer.unflatten(0, (-1, page_size))
