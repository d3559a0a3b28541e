# SPDX-License-Identifier: Apache-2.0
"""SGLang's pools of token slots and of states as a geometry. SGLang is not imported; only its tensors are read.

pool.k_buffer[layer]   | page 0: for dummies | page 1                  | ...
                                             | slot 16 | slot 17 | ... |        page_size 16
                                             | head 0: channels | head 1 | ...

mamba_cache.conv[0]    | layer 0: slot 0: for dummies | slot 1                  | ... | layer 1 ...
                                                      | channels of x | B | C |         each has its rows
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvhma.errors import GeometryError
from kvhma.geometry import Geometry, Group, Shard
from kvhma.tensors.geometry import LayerTensors, RankOptions, TensorPart, geometry_from_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MHA, _MLA, _DSA = "MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool"
_SWA, _HYBRID, _STATE = "SWAKVPool", "HybridLinearKVPool", "MambaPool"
_OF_TOKENS = (_MHA, _MLA, _DSA)

_REASONS = {
    "NPU|^NoOp": "other tensors than the class it derives from",
    "DeepSeekV4|HiSparseC4": "states of compression and rings of requests beside its pages",
    "HiSparse": "its slots are not the numbers that the scheduler has",
    "FP4|FP8|Nvfp4": "scales in separate tensors",
    "^Unified": "layers of several pools in one buffer, whose ids are virtual",
    "^PageInterleave|^LayerSplit": "its pages or layers are spread over ranks",
    "MiniMax|KOnly|QSA": "an index with separate slots",
}
"""Why a class is refused, by a pattern of its name; the first one counts."""

_CONVOLUTIONS = (("x",), ("x", "B", "C"), ("q", "k", "v"))
"""Parts of a convolution in the order of a pool: of Mamba1 and LFM2, of Mamba2, and of GDN and KDA."""

_DSA_ROW = "fp8_ds_mla"
"""The encoding of a row of 8-bit values, their scales and positions in bfloat16."""


_Found: TypeAlias = tuple[int, TensorPart]
"""The number of a layer in the model, and a view of one of its parts."""


def geometry_of_pool(
    pool: Any,
    *,
    heads: Shard | None = None,
    swa_heads: Shard | None = None,
    sliding_window_size: int | None = None,
    conv: Mapping[str, int] | None = None,
    layer_name: Callable[[int], str] = "layers.{}".format,
    **rank: Unpack[RankOptions],
) -> Geometry:
    """Describe a pool of SGLang: of attention layers, of states, or of both.

    A block is a page of ``page_size`` slots, and a block id is a page number: the slot divided by ``page_size``. A
    state is one slot, whose number is the block id.

    Each part of a layer is a layer here, as in :meth:`kvhma.Geometry.by_parts`. ``layers.7.k`` and ``layers.7.v`` are
    keys and values, ``layers.7.kv`` is a latent, and ``layers.7.index`` the index of a latent. A state has
    ``layers.7.ssm`` and the parts of its convolution.

    The groups: attention; then the windows of an ``SWAKVPool``, whose pages belong to a separate pool; or the states of
    a ``HybridLinearKVPool``. A ``MambaPool`` is one group.

    An 8-bit pool has the dtype that it names. Its scales are parameters of the model, which both sides must share.

    Args:
        pool: an ``MHATokenToKVPool``, ``MLATokenToKVPool`` or ``DSATokenToKVPool``; an ``SWAKVPool`` or
            ``HybridLinearKVPool`` of these; or a ``MambaPool``.
        heads: the KV heads of this rank among those of all ranks; None if it holds all.
        swa_heads: the same for the windows of an ``SWAKVPool``; None for `heads`.
        sliding_window_size: SGLang's ``ModelRunner.sliding_window_size``, for an ``SWAKVPool`` only: the tokens that a
            query of a sliding layer sees before itself. The window of the geometry has one token more.
        conv: channels of each part of a convolution over all ranks: ``x``, ``B`` and ``C`` of Mamba2, ``x`` of Mamba1
            and LFM2, ``q``, ``k`` and ``v`` of GDN and KDA. None if the pool knows them (``conv_shard_groups``).
        layer_name: the name of a layer from its number in the model: for those of a draft model.
        **rank: as for :func:`geometry_from_tensors`. Channels and heads of states are cut by ``tp_rank`` and
            ``tp_size``.

    Returns:
        The geometry of this rank.

    Raises:
        GeometryError: another class, including subclasses, which may store other bytes; a layout other than ``nhd`` and
            ``hnd``; or a quantized cache. Or the pool does not know which layers of the model it has. Or an argument is
            missing, or given for another class.
    """
    name = _class_of(pool, (*_OF_TOKENS, _SWA, _HYBRID, _STATE))
    for argument, value, classes in (
        ("sliding_window_size", sliding_window_size, (_SWA,)),
        ("swa_heads", swa_heads, (_SWA,)),
        ("conv", conv, (_HYBRID, _STATE)),
    ):
        if value is not None and name not in classes:
            raise GeometryError(f"{argument} is {value}, and the pool is a {name}: it is for {' or '.join(classes)}")
    found: list[tuple[Group, Iterator[_Found]]] = []
    if name == _SWA:
        if sliding_window_size is None:
            raise GeometryError(f"sliding_window_size is None, and the pool is a {name}, which needs it")
        of_group: list[dict[int, int]] = [{}, {}]
        for number, (at, is_sliding) in pool.layers_mapping.items():
            of_group[is_sliding][number] = at
        window = Group("sliding", int(pool.swa_kv_pool.page_size), window=sliding_window_size + 1)
        found.append((_group(pool.full_kv_pool), _attention(pool.full_kv_pool, of_group[0], heads)))
        found.append((window, _attention(pool.swa_kv_pool, of_group[1], swa_heads or heads)))
    elif name == _HYBRID:
        numbers = pool.full_attention_layer_id_mapping
        found.append((_group(pool.full_kv_pool), _attention(pool.full_kv_pool, numbers, heads)))
    elif name in _OF_TOKENS:
        found.append((_group(pool), _attention(pool, _layers_of_model(pool, name), heads)))
    if name in (_HYBRID, _STATE):
        states = pool if name == _STATE else pool.mamba_pool
        found.append((Group("ssm", 1), _states(states, conv, rank.get("tp_rank", 0), rank.get("tp_size", 1))))
    layers: dict[str, LayerTensors] = {}
    for index, (_, of_pool) in enumerate(found):
        for number, part in of_pool:
            label = f"{layer_name(number)}.{part.name}"
            if label in layers:
                raise GeometryError(f"layer {label!r}: is the name of another layer too")
            layers[label] = LayerTensors(index, (part,))
    return geometry_from_tensors([group for group, _ in found], layers, **rank)


def _class_of(pool: Any, known: tuple[str, ...]) -> str:
    """Return the name of a known class, checked by name and module."""
    kind = type(pool)
    if not kind.__module__.startswith("sglang.srt.") or kind.__name__ not in known:
        reasons = (reason for pattern, reason in _REASONS.items() if re.search(pattern, kind.__name__))
        reason = next(reasons, "its bytes are not known")
        raise GeometryError(f"{kind.__module__}.{kind.__name__}: {reason}; known here are SGLang's {', '.join(known)}")
    return kind.__name__


def _group(pool: Any) -> Group:
    """Return the group of a pool without windows."""
    return Group("full" if _class_of(pool, _OF_TOKENS) == _MHA else "mla", int(pool.page_size))


def _layers_of_model(pool: Any, name: str) -> dict[int, int]:
    """Return the index of each layer in a pool, by its number in the model.

    A hybrid pool writes these numbers into an MHA pool that it contains, but not into an MLA pool, which then counts
    from 0. Only an engine's own MLA pool is built with ``end_layer``, one past its last layer.
    """
    numbers = getattr(pool, "model_layer_ids", ())
    if len(numbers) != pool.layer_num:
        raise GeometryError(f"{name}: layer_num is {pool.layer_num}, model_layer_ids {numbers}")
    if name != _MHA and pool.end_layer - pool.start_layer != pool.layer_num:
        raise GeometryError(
            f"{name}: layer_num is {pool.layer_num}, start_layer {pool.start_layer}, end_layer {pool.end_layer}: "
            f"it does not know which layers of the model it has, as within a {_HYBRID}: describe that one"
        )
    return {int(number): at for at, number in enumerate(numbers)}


def _attention(pool: Any, layers: Mapping[int, int], heads: Shard | None) -> Iterator[_Found]:
    """Yield the layers of a pool of tokens, given the index of each in the pool by its number in the model."""
    name = _class_of(pool, _OF_TOKENS)
    if getattr(pool, "post_capture_active", False):
        raise GeometryError(f"{name}: post_capture_active, whose tensors are larger than their memory")
    yield from _vectors(pool, layers, heads) if name == _MHA else _latents(pool, layers, name)


def _vectors(pool: Any, layers: Mapping[int, int], heads: Shard | None) -> Iterator[_Found]:
    """Yield K and V of each layer."""
    layout = pool.kv_cache_layout
    if layout not in ("nhd", "hnd") or pool.is_quantized_kv_cache:
        raise GeometryError(f"{_MHA}: kv_cache_layout {layout!r}, quantized {pool.is_quantized_kv_cache}")
    shards = {} if heads is None else {"heads": heads}
    for number, at in layers.items():
        for part, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
            view = _encoded(pool, buffers[at])
            pages = view.transpose(1, 2) if layout == "hnd" else _pages(number, view, pool.page_size)
            yield number, TensorPart(part, pages, ("blocks", "tokens", "heads", "content"), shards)


def _latents(pool: Any, layers: Mapping[int, int], name: str) -> Iterator[_Found]:
    """Yield the latents of each layer, and its index: a page of it has all keys, then all scales, and is never cut."""
    if name == _MLA and pool.use_dsa:
        raise GeometryError(f"{name}: use_dsa, and there is no index: known is a {_DSA}")
    if name == _DSA and pool.kpool_use_compress:
        raise GeometryError(f"{name}: kpool_use_compress, whose last tokens belong to a request and not to a page")
    is_mixed = name == _DSA and pool.dsa_kv_cache_store_fp8
    for number, at in layers.items():
        rows = pool.kv_buffer[at] if is_mixed else _encoded(pool, pool.kv_buffer[at])
        pages = _pages(number, rows, pool.page_size)[:, :, 0]
        dtype = _DSA_ROW if is_mixed else None
        yield number, TensorPart("kv", pages, ("blocks", "tokens", "content"), dtype=dtype)
        index = pool.index_k_with_scale_buffer[at] if name == _DSA else ()
        if len(index):  # Layers that use the choice of the layer before have none.
            if not 0 <= len(index) - len(pages) <= 1:
                raise GeometryError(f"{name}: layer {number} has {len(pages)} pages, its index {len(index)}")
            yield number, TensorPart("index", index[: len(pages)], ("blocks", "content"))


def _encoded(pool: Any, buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer with the dtype of its values: SGLang stores 8-bit floats as ``uint8``."""
    if pool.dtype.itemsize != buffer.element_size():
        raise GeometryError(f"{type(pool).__name__}: dtype {pool.dtype} is stored as {buffer.dtype}")
    return buffer.view(pool.dtype)


def _pages(number: int, buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return slots ``(n, heads, channels)`` as pages ``(n // page_size, page_size, heads, channels)``.

    SGLang hands out whole pages only, so no page has the slots that are left over at the end.
    """
    if buffer.dim() != 3 or len(buffer) < page_size:
        shape = tuple(buffer.shape)
        raise GeometryError(f"layer {number}: shape {shape} is not (slots, heads, channels) of pages of {page_size}")
    return buffer[: len(buffer) // page_size * page_size].unflatten(0, (-1, page_size))


def _states(pool: Any, conv: Mapping[str, int] | None, tp_rank: int, tp_size: int) -> Iterator[_Found]:
    """Yield convolution and recurrent state of each layer, as far as it has them."""
    name, cache = _class_of(pool, (_STATE,)), pool.mamba_cache
    if pool._slot_siblings:
        others = ", ".join(type(state).__name__ for state in pool._slot_siblings)
        raise GeometryError(f"{name}: its slots also have {others}")
    if len(cache.conv) != 1:
        raise GeometryError(f"{name}: {len(cache.conv)} convolution states in a layer, known is one")
    (convolution,), temporal = cache.conv, cache.temporal
    axis = 1 + pool.conv_slice_axis
    axes = ("blocks", "channels", "rows") if axis == 1 else ("blocks", "rows", "channels")
    shares = _shares(pool, conv, tp_rank, tp_size) if convolution.numel() else {}
    heads = Shard(temporal.shape[2] * tp_size, temporal.shape[2] * tp_rank, temporal.shape[2])
    for at, number in enumerate(pool.mamba_layer_ids):
        if shares:
            views = convolution[at].split([share.held for share in shares.values()], axis)
            for (part, share), view in zip(shares.items(), views, strict=True):
                yield number, TensorPart(part, view, axes, {"channels": share})
        if temporal.numel():
            state = TensorPart("ssm", temporal[at], ("blocks", "heads", "content", "content"), {"heads": heads})
            yield number, state


def _shares(pool: Any, conv: Mapping[str, int] | None, tp_rank: int, tp_size: int) -> dict[str, Shard]:
    """Return the channels of this rank of each part of a convolution, in the order of the pool."""
    known = pool.conv_shard_groups
    if conv is None:
        if known is None or len(known) != 3:
            raise GeometryError(
                f"{_STATE}: conv_shard_groups is {known}, and conv is None: pass the channels of x, B and C"
            )
        conv = dict(zip("qkv", known, strict=True))
    elif known is not None and list(known) != list(conv.values()):
        raise GeometryError(f"{_STATE}: conv_shard_groups is {known}, and conv is {dict(conv)}")
    if tuple(conv) not in _CONVOLUTIONS:
        raise GeometryError(f"conv: parts {', '.join(conv)} are not those of a pool: {_CONVOLUTIONS}")
    shares = {}
    for part, extent in conv.items():
        # Every rank has a single group whole.
        ranks = 1 if part in ("B", "C") and extent == pool.mamba_cache.temporal.shape[-1] else tp_size
        if ranks < 1 or extent % ranks:
            raise GeometryError(f"conv: {extent} channels of {part} cannot be cut for {ranks} ranks")
        held = extent // ranks
        shares[part] = Shard(extent, held * (tp_rank % ranks), held)
    channels, sizes = pool.mamba_cache.conv[0].shape[2 + pool.conv_slice_axis], [s.held for s in shares.values()]
    given = f"{dict(conv)} gives rank {tp_rank} of {tp_size} {sum(sizes)}"
    if sum(sizes) != channels:
        raise GeometryError(f"{_STATE}: {channels} channels, and {given}")
    _, _, heads, width, state = pool.mamba_cache.temporal.shape
    inner = sizes.pop(-1 if "v" in shares else 0)
    if state and (inner != heads * width or len(set(sizes)) > 1):
        raise GeometryError(f"{_STATE}: a state of {heads} heads of {width}, and {given}, {inner} of x or v")
    return shares
