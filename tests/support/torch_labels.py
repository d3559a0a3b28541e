# SPDX-License-Identifier: Apache-2.0
"""Labels for every byte of a torch cache, written and read through the layers' views.

Views hold items of a few bytes, too few for a label each: a label is written digit by digit, one byte of it at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.geometry import Axis, Geometry, Layer, Part
from kvhma.torch import AttentionSpec, Cache, MLASpec, Spec, StateSpec

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DIGITS = 3

Ints = NDArray[np.int64]
LETTERS = {"H": "heads", "N": "tokens", "C": "content"}


def tensors_of(view: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return view if isinstance(view, tuple) else (view,)


def regions_of(cache: Cache) -> list[NDArray[np.uint8]]:
    """Return the buffers as bytes, in the order of the geometry's regions."""
    by_base = {buffer.tensor.data_ptr(): buffer.tensor for buffer in cache.buffers}
    return [by_base[region.base].view(-1).numpy().view(np.uint8) for region in cache.geometry.regions]


def write(view: torch.Tensor, values: NDArray[np.uint8], kernels: torch.Tensor, at: int) -> None:
    """Write bytes, ``(*view.shape, item)`` but for the chosen blocks of dimension `at`, as items of the view."""
    integers = torch.from_numpy(values.view(f"<i{view.element_size()}" if view.element_size() > 1 else np.uint8))
    view.view(INTEGERS[view.element_size()]).index_copy_(at, kernels, integers.squeeze(-1))


def read(view: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a view's items, ``(*view.shape, item)``."""
    integers = view.view(INTEGERS[view.element_size()]).contiguous().numpy()
    return integers.view(np.uint8).reshape(*view.shape, view.element_size())


def block_dim(spec: Spec) -> int:
    return spec.dims.index("B") if isinstance(spec, AttentionSpec | MLASpec) else 0


def addresses(geometry: Geometry, name: str, spec: Spec) -> list[Ints]:
    """Return, by the geometry alone, the region's byte of each byte of each tensor of a view: ``(*shape, item)``."""
    layer = geometry.layer_by_name[name]
    ratio = geometry.groups[layer.group].ratio
    parts = {part.name: part for part in layer.page.parts}
    kernels = _kernels(layer, ratio)
    if isinstance(spec, AttentionSpec | MLASpec):
        if spec.kv == "packed":
            return [_grid(kernels, parts["kv"], spec.dims)]
        halves = [_grid(kernels, parts[half], spec.dims.replace("S", "")) for half in "kv"]
        return [np.stack(halves, axis=spec.dims.index("S"))]
    if isinstance(spec, StateSpec):
        found = []
        if spec.conv:
            dims = "BWR" if spec.conv_order == "DS" else "BRW"
            pieces = [_grid(kernels, parts[part.name], dims) for part in spec.conv]
            found.append(np.concatenate(pieces, axis=dims.index("W")))
        if spec.ssm_heads is not None:
            flat = _grid(kernels, parts["ssm"], "BHC" if spec.ssm_shape else "BH")
            found.append(flat.reshape(*flat.shape[:2], *spec.ssm_shape, flat.shape[-1]))
        return found
    return [_grid(kernels, parts["opaque"], "BO")]


def _kernels(layer: Layer, ratio: int) -> Ints:
    stride = layer.block_stride // ratio if layer.kernel_stride is None else layer.kernel_stride
    blocks = np.arange(layer.num_blocks)[:, None] * layer.block_stride + np.arange(ratio) * stride
    return layer.offset + blocks.reshape(-1)


def _grid(kernels: Ints, part: Part, dims: str) -> Ints:
    names = {**LETTERS, "W": "channels", "R": "rows", "O": "bytes"}
    axes = {axis.name: axis for axis in part.axes}
    total = np.zeros((1,) * (len(dims) + 1), np.int64) + part.offset
    for at, letter in enumerate(dims):
        steps = kernels if letter == "B" else _steps(axes.get(names[letter]))
        total = total + steps.reshape([-1 if other == at else 1 for other in range(len(dims) + 1)])
    return total + np.arange(part.item_bytes)


def _steps(axis: Axis | None) -> Ints:
    """Offsets of an axis; a view may have a dimension of one index where the part has no axis."""
    return np.zeros(1, np.int64) if axis is None else np.arange(axis.length or 0) * axis.stride


class Labels:
    """Labels of the blocks that each group owns."""

    def __init__(self, cache: Cache, specs: Mapping[str, Spec], owner: NDArray[np.int64]) -> None:
        """Number the bytes: `owner` is the group of every logical block."""
        self.cache, self.specs = cache, specs
        self.kernels: dict[str, Ints] = {}
        self.labels: dict[str, list[Ints]] = {}
        count = 1
        for name, spec in specs.items():
            layer = cache.geometry.layer_by_name[name]
            ratio = cache.geometry.groups[layer.group].ratio
            blocks = np.flatnonzero(owner == layer.group)
            self.kernels[name] = (blocks[:, None] * ratio + np.arange(ratio)).reshape(-1)
            self.labels[name] = []
            for tensor in tensors_of(cache.views[name]):
                shape = [*tensor.shape, tensor.element_size()]
                shape[block_dim(spec)] = len(self.kernels[name])
                self.labels[name].append(np.arange(count, count + int(np.prod(shape))).reshape(shape))
                count += int(np.prod(shape))
        self.count = count - 1
        assert count < 256**DIGITS

    def written(self) -> list[Ints]:
        """Write all labels through the views and return what the regions hold."""
        memory = regions_of(self.cache)
        images = [np.zeros(region.size, np.int64) for region in memory]
        for digit in range(DIGITS):
            for region in memory:
                region[:] = 0
            for name, spec in self.specs.items():
                for tensor, labels in zip(tensors_of(self.cache.views[name]), self.labels[name], strict=True):
                    values = np.ascontiguousarray((labels >> (8 * digit)).astype(np.uint8))
                    write(tensor, values, torch.from_numpy(self.kernels[name]), block_dim(spec))
            for image, region in zip(images, memory, strict=True):
                image += region.astype(np.int64) << (8 * digit)
        return images

    def locations(self, name: str) -> list[Ints]:
        """Return the region's bytes where the geometry has a layer's labels."""
        spec = self.specs[name]
        at = block_dim(spec)
        return [np.take(grid, self.kernels[name], at) for grid in addresses(self.cache.geometry, name, spec)]
