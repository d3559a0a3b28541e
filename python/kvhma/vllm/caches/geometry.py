# SPDX-License-Identifier: Apache-2.0
"""The geometry of a live worker, from its KV cache configuration and its registered views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvhma.errors import GeometryError, UnsupportedPairError
from kvhma.geometry import Geometry, Group, Kind, Layer, Page
from kvhma.tensors.regions import Location, locate
from kvhma.vllm.caches.formats import Writer, kind_of, transferred_groups
from kvhma.vllm.caches.layer_parts import LayerCache, RankInfo, View, parts_of


def geometry_of(
    config: Any, caches: Mapping[str, Any], rank_info: RankInfo, *, writer: Callable[[str], Writer] = lambda _: Writer()
) -> Geometry:
    """Describe a worker's caches.

    Args:
        config: the worker's ``KVCacheConfig``.
        caches: the 4-dimensional view ``[kernel blocks, heads, states, content]`` of each layer.
        rank_info: the worker.
        writer: returns the writer of a layer's cache. A cache with an unknown writer is one part, which only an equal
            engine can read.

    Returns:
        One group for each of `kvhma.vllm.caches.formats.transferred_groups`, in their order. These are the groups of
        all pipeline stages, so some may have no layer here. Layers that use the cache of another layer are left out.

    Raises:
        GeometryError: an unknown spec, view or device; the text names the layer and what was found.
        UnsupportedPairError: a cache that cannot be right after a load.
        AddressOverflowError: an address does not fit 64 bits.
    """
    transferred = [config.kv_cache_groups[number] for number in transferred_groups(config)]
    names = (name for group in transferred for name in group.layer_names if name in caches)
    regions, locations = locate({_label(name): caches[name] for name in names})
    memories = {region.memory for region in regions}
    if len(memories) > 1:
        raise GeometryError(f"regions: caches are in {' and '.join(sorted(memories))}, one kind is supported")
    groups: list[Group] = []
    layers: list[Layer] = []
    for index, group in enumerate(transferred):
        if group.host_resident:
            raise GeometryError(f"group {index}: its blocks are host_resident, which is not supported")
        specs = _layer_specs(index, group)
        views = {name: _view(name, cache, writer(name)) for name, cache in _own_caches(group, caches).items()}
        ratio = _kernel_blocks_per_block(index, views, config.num_blocks)
        place = rank_info.of_group(group.kv_cache_spec)
        groups.append(_group(index, specs, ratio, place))
        for name, view in views.items():
            page = Page(parts_of(LayerCache.read(name, specs[name], view), place))
            layers.append(_layer(name, index, locations[_label(name)], view, config.num_blocks, page))
    return Geometry(regions, tuple(groups), tuple(layers), rank_info.tp_rank, rank_info.tp_size)


def _label(name: str) -> str:
    return f"layer {name!r}"


def _layer(name: str, group: int, location: Location, view: View, num_blocks: int, page: Page) -> Layer:
    """Describe a layer.

    ::

        location
        | kernel block | kernel block | ... | kernel block | kernel block ...
        |<-- stride -->|
        |<------ block_stride = stride * ratio ----------->| the next block
    """
    stride = view.strides[0]
    ratio = view.shape[0] // num_blocks
    return Layer(
        name=name,
        group=group,
        region=location.region,
        offset=location.offset,
        num_blocks=num_blocks,
        block_stride=stride * ratio,
        page=page,
        kernel_stride=None if ratio == 1 else stride,
    )


def _own_caches(group: Any, caches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the caches of a group's layers. A shared cache belongs to the first of its layers."""
    own: dict[int, tuple[str, Any]] = {}
    for name in group.layer_names:
        if name not in caches:
            raise GeometryError(f"{_label(name)}: no cache was registered, known are {', '.join(caches)}")
        own.setdefault(caches[name].data_ptr(), (name, caches[name]))
    return dict(own.values())


def _kernel_blocks_per_block(index: int, views: Mapping[str, View], num_blocks: int) -> int:
    ratios: dict[int, str] = {}
    for name, view in views.items():
        ratio, rest = divmod(view.shape[0], num_blocks)
        if rest or not ratio:
            raise GeometryError(f"{_label(name)}: {view.shape[0]} kernel blocks, {num_blocks} blocks")
        ratios.setdefault(ratio, name)
    if len(ratios) > 1:
        raise GeometryError(f"group {index}: layers differ in kernel blocks per block: {ratios}")
    return next(iter(ratios), 1)


def _layer_specs(index: int, group: Any) -> dict[str, Any]:
    """Return the spec of each layer. A group has blocks and a spec even in stages without its layers."""
    several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    names = group.layer_names or [f"of group {index}, in another stage"]
    return dict(several) if several is not None else dict.fromkeys(names, group.kv_cache_spec)


def _group(index: int, specs: Mapping[str, Any], ratio: int, place: RankInfo) -> Group:
    kinds: dict[Kind, str] = {}
    for name, spec in specs.items():
        kinds.setdefault(kind_of(name, spec), name)
    # Layers that cache all tokens can share a block table, even with different bytes for a token.
    kind: Kind = "full" if set(kinds) == {"full", "mla"} else next(iter(kinds))
    if len(kinds) > 1 and kind != "full":
        raise GeometryError(f"group {index}: layers are of different kinds: {kinds}")
    windows = {_window(spec, kind) for spec in specs.values()}
    sizes = {spec.block_size for spec in specs.values()}
    if len(windows) > 1 or len(sizes) > 1:
        raise GeometryError(f"group {index}: layers have windows {windows} and block sizes {sizes}")
    window, block_size = windows.pop(), sizes.pop()
    if place.cp_size > 1 and kind not in ("full", "mla"):
        raise UnsupportedPairError(
            f"group {index}: decode_context_parallel_size is {place.cp_size}, in a {kind} group only 1 is supported"
        )
    return Group(
        kind,
        block_size,
        ratio=ratio,
        window=window if kind == "sliding" else None,
        chunk=window if kind == "chunked" else None,
        speculative=max(getattr(spec, "num_speculative_blocks", 0) for spec in specs.values()),
        cp_rank=place.cp_rank,
        cp_size=place.cp_size,
        cp_interleave=place.cp_interleave if place.cp_size > 1 and place.cp_interleave != block_size else None,
    )


def _window(spec: Any, kind: Kind) -> int | None:
    if kind == "sliding":
        # A draft module also reads tokens before the window, so these are needed as well.
        return int(spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if kind == "chunked" else None


def _view(name: str, tensor: Any, writer: Writer) -> View:
    if tensor.dim() != 4:
        raise GeometryError(f"{_label(name)}: the cache has shape {tuple(tensor.shape)}, expected four dimensions")
    item = tensor.element_size()
    strides = tuple(stride * item for stride in tensor.stride())
    return View(tuple(tensor.shape), strides, item, str(tensor.dtype).removeprefix("torch."), writer)
