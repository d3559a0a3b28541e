# SPDX-License-Identifier: Apache-2.0
"""The geometry of a live worker, from its KV cache configuration and the views it registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvhma.errors import GeometryError
from kvhma.geometry import Geometry, Group, Kind, Layer, Page
from kvhma.tensors.regions import locate
from kvhma.vllm.formats import Writer, transferred_groups
from kvhma.vllm.layer_parts import RankInfo, View, kind_of, parts_of


def geometry_of(
    config: Any, caches: Mapping[str, Any], rank_info: RankInfo, *, writer: Callable[[str], Writer] = lambda _: Writer()
) -> Geometry:
    """Describe a worker's caches.

    Args:
        config: the worker's ``KVCacheConfig``.
        caches: the 4-dimensional view ``[kernel blocks, heads, states, content]`` of each layer.
        rank_info: the worker.
        writer: who writes the cache of a layer. A cache whose writer is not known is one part that only an equal
            engine can read.

    Returns:
        One group for each of `kvhma.vllm.formats.transferred_groups`, in their order. Layers that use
        the cache of another one are left out.

    Raises:
        GeometryError: a spec, a view or a device that is not known; the text names the layer and what was found.
        UnsupportedPairError: a cache that cannot be right after a load.
        AddressOverflowError: an address does not fit 64 bits.
    """
    taken = [config.kv_cache_groups[number] for number in transferred_groups(config)]
    names = (name for group in taken for name in group.layer_names if name in caches)
    regions, locations = locate({f"layer {name!r}": caches[name] for name in names})
    groups: list[Group] = []
    layers: list[Layer] = []
    for index, group in enumerate(taken):
        if group.host_resident:
            raise GeometryError(f"group {index}: its blocks are host_resident, which is not supported")
        specs = _layer_specs(group)
        placed: dict[int, str] = {}
        ratios: dict[int, str] = {}
        for name in group.layer_names:
            if name not in caches:
                raise GeometryError(f"layer {name!r}: no cache was registered, known are {', '.join(caches)}")
            tensor = caches[name]
            if placed.setdefault(tensor.data_ptr(), name) != name:
                continue
            view = _view(name, tensor, writer(name))
            ratio, rest = divmod(view.shape[0], config.num_blocks)
            if rest or not ratio:
                raise GeometryError(f"layer {name!r}: {view.shape[0]} kernel blocks, {config.num_blocks} blocks")
            ratios.setdefault(ratio, name)
            location = locations[f"layer {name!r}"]
            layers.append(
                Layer(
                    name=name,
                    group=index,
                    region=location.region,
                    offset=location.offset,
                    num_blocks=config.num_blocks,
                    block_stride=view.strides[0] * ratio,
                    page=Page(parts_of(name, specs[name], view, rank_info)),
                    kernel_stride=None if ratio == 1 else view.strides[0],
                )
            )
        if len(ratios) > 1:
            raise GeometryError(f"group {index}: layers differ in kernel blocks per block: {ratios}")
        groups.append(_group(index, specs, next(iter(ratios), 1)))
    memories = {region.memory for region in regions}
    if len(memories) > 1:
        raise GeometryError(f"regions: caches are in {' and '.join(sorted(memories))}, one kind is supported")
    return Geometry(regions, tuple(groups), tuple(layers), rank_info.tp_rank, rank_info.tp_size)


def _layer_specs(group: Any) -> dict[str, Any]:
    several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict(several) if several is not None else dict.fromkeys(group.layer_names, group.kv_cache_spec)


def _group(index: int, specs: Mapping[str, Any], ratio: int) -> Group:
    kinds: dict[Kind, str] = {}
    for name, spec in specs.items():
        kinds.setdefault(kind_of(name, spec), name)
    # Layers that keep everything can share a block table whatever they keep of a token.
    kind: Kind = "full" if set(kinds) == {"full", "mla"} else next(iter(kinds))
    if len(kinds) > 1 and kind != "full":
        raise GeometryError(f"group {index}: layers are of different kinds: {kinds}")
    windows = {_window(spec, kind) for spec in specs.values()}
    sizes = {spec.block_size for spec in specs.values()}
    if len(windows) > 1 or len(sizes) > 1:
        raise GeometryError(f"group {index}: layers have windows {windows} and block sizes {sizes}")
    window = windows.pop()
    return Group(
        kind,
        sizes.pop(),
        ratio=ratio,
        window=window if kind == "sliding" else None,
        chunk=window if kind == "chunked" else None,
        speculative=max(getattr(spec, "num_speculative_blocks", 0) for spec in specs.values()),
    )


def _window(spec: Any, kind: Kind) -> int | None:
    if kind == "sliding":
        # What a draft module re-reads behind the window has to be there as well.
        return int(spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if kind == "chunked" else None


def _view(name: str, tensor: Any, writer: Writer) -> View:
    if tensor.dim() != 4:
        raise GeometryError(f"layer {name!r}: the cache has shape {tuple(tensor.shape)}, expected four dimensions")
    item = tensor.element_size()
    a, b, c, d = tensor.shape
    strides = [stride * item for stride in tensor.stride()]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return View((a, b, c, d), (strides[0], strides[1], strides[2], strides[3]), item, dtype, writer)
