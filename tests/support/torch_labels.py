# SPDX-License-Identifier: Apache-2.0
"""Labels of every byte of a torch cache: written through the views, and where the geometry alone has them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.geometry import Axis, Geometry, Layer, Part
from kvhma.torch import Cache, View

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DIGITS = 3

Ints = NDArray[np.int64]
NAMES = {"H": "heads", "N": "tokens", "C": "content", "W": "channels", "R": "rows"}


def tensors_of(view: View) -> tuple[torch.Tensor, ...]:
    return view if isinstance(view, tuple) else (view,)


def regions_of(cache: Cache) -> list[NDArray[np.uint8]]:
    """Return the buffers as bytes, in the order of the geometry's regions."""
    return [buffer.tensor.view(-1).numpy().view(np.uint8) for buffer in cache.buffers]


def write(view: torch.Tensor, values: NDArray[np.uint8], kernels: torch.Tensor, at: int) -> None:
    """Write bytes, ``(*view.shape, item)`` but for the chosen blocks of dimension `at`, as items of the view."""
    integers = torch.from_numpy(values.view(f"<i{view.element_size()}" if view.element_size() > 1 else np.uint8))
    view.view(INTEGERS[view.element_size()]).index_copy_(at, kernels, integers.squeeze(-1))


def read(view: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a view's items, ``(*view.shape, item)``."""
    integers = view.view(INTEGERS[view.element_size()]).contiguous().numpy()
    return integers.view(np.uint8).reshape(*view.shape, view.element_size())


def dims_of(geometry: Geometry, layer: Layer, dims: str) -> str:
    """Return the dimensions of a layer's view if the kernel wants `dims`; state and latents have others."""
    if geometry.groups[layer.group].kind == "ssm":
        return "B"
    names = {axis.name for axis in layer.page.parts[0].axes}
    return "".join(letter for letter in dims if letter in "BS" or NAMES[letter] in names)


def addresses(geometry: Geometry, name: str, dims: str) -> list[Ints]:
    """Return, by the geometry alone, the region's byte of each byte of each tensor of a view: ``(*shape, item)``."""
    layer = geometry.layer_by_name[name]
    parts = {part.name: part for part in layer.page.parts}
    kernels = _kernels(layer, geometry.groups[layer.group].ratio)
    if geometry.groups[layer.group].kind == "ssm":
        found = []
        conv = [part for part in layer.page.parts if part.name != "ssm"]
        if conv:
            strides = {axis.name: axis.stride for axis in conv[0].axes}
            order = "BWR" if strides["channels"] >= strides["rows"] else "BRW"
            found.append(np.concatenate([_grid(kernels, part, order) for part in conv], axis=order.index("W")))
        return [*found, *(_grid(kernels, part, "BHC") for part in layer.page.parts[len(conv) :])]
    order = dims_of(geometry, layer, dims)
    if "kv" in parts:
        return [_grid(kernels, parts["kv"], order)]
    halves = [_grid(kernels, parts[half], order.replace("S", "")) for half in "kv"]
    return [np.stack(halves, axis=order.index("S"))]


def _kernels(layer: Layer, ratio: int) -> Ints:
    stride = layer.block_stride // ratio if layer.kernel_stride is None else layer.kernel_stride
    blocks = np.arange(layer.num_blocks)[:, None] * layer.block_stride + np.arange(ratio) * stride
    return layer.offset + blocks.reshape(-1)


def _grid(kernels: Ints, part: Part, dims: str) -> Ints:
    axes = {axis.name: axis for axis in part.axes}
    total = np.zeros((1,) * (len(dims) + 1), np.int64) + part.offset
    for at, letter in enumerate(dims):
        steps = kernels if letter == "B" else _steps(axes[NAMES[letter]])
        total = total + steps.reshape([-1 if other == at else 1 for other in range(len(dims) + 1)])
    return total + np.arange(part.item_bytes)


def _steps(axis: Axis) -> Ints:
    return np.arange(axis.length or 0) * axis.stride


class Labels:
    """Labels of the blocks that each group owns."""

    def __init__(self, cache: Cache, dims: str, owner: NDArray[np.int64]) -> None:
        """Number the bytes: `owner` is the group of every logical block."""
        self.cache, self.dims = cache, dims
        self.kernels: dict[str, Ints] = {}
        self.labels: dict[str, list[Ints]] = {}
        count = 1
        for layer in cache.geometry.layers:
            ratio = cache.geometry.groups[layer.group].ratio
            blocks = np.flatnonzero(owner == layer.group)
            self.kernels[layer.name] = (blocks[:, None] * ratio + np.arange(ratio)).reshape(-1)
            self.labels[layer.name] = []
            for tensor in tensors_of(cache.views[layer.name]):
                shape = [*tensor.shape, tensor.element_size()]
                shape[self.at(layer.name)] = len(self.kernels[layer.name])
                self.labels[layer.name].append(np.arange(count, count + int(np.prod(shape))).reshape(shape))
                count += int(np.prod(shape))
        self.count = count - 1
        assert count < 256**DIGITS

    def at(self, name: str) -> int:
        """Return which dimension of a layer's view counts blocks."""
        return dims_of(self.cache.geometry, self.cache.geometry.layer_by_name[name], self.dims).index("B")

    def written(self) -> list[Ints]:
        """Write all labels through the views and return what the regions hold."""
        memory = regions_of(self.cache)
        images = [np.zeros(region.size, np.int64) for region in memory]
        for digit in range(DIGITS):
            for region in memory:
                region[:] = 0
            for name, view in self.cache.views.items():
                for tensor, labels in zip(tensors_of(view), self.labels[name], strict=True):
                    values = np.ascontiguousarray((labels >> (8 * digit)).astype(np.uint8))
                    write(tensor, values, torch.from_numpy(self.kernels[name]), self.at(name))
            for image, region in zip(images, memory, strict=True):
                image += region.astype(np.int64) << (8 * digit)
        return images

    def locations(self) -> Mapping[str, list[Ints]]:
        """Return the regions' bytes where the geometry has each layer's labels."""
        geometry = self.cache.geometry
        return {
            name: [np.take(grid, self.kernels[name], self.at(name)) for grid in addresses(geometry, name, self.dims)]
            for name in self.cache.views
        }
