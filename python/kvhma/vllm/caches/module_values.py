# SPDX-License-Identifier: Apache-2.0
"""Reads from the modules of a loaded model what decides the values in its caches, besides the weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp

from kvhma.errors import UnsupportedPairError
from kvhma.vllm.wire.built_layers import COLUMNS, POSITIONS, BuiltLayer, BuiltLayers, Row, Scalar


def built_layers(names: Iterable[str], context: Mapping[str, Any], settings: Collection[str]) -> BuiltLayers:
    """Read the layers of a model from its modules.

    Args:
        names: of vLLM's cached layers.
        context: vLLM's ``static_forward_context``: the modules of cached layers, by name.
        settings: names in the model's configuration. A switch with such a name belongs to the model; others choose
            kernels.

    Raises:
        UnsupportedPairError: no caller holds the model with these layers, so this version of vLLM cannot be used.
    """
    cached = {name: context[name] for name in names if isinstance(context.get(name), torch.nn.Module)}
    parents = _parents(cached.values())
    kinds: list[BuiltLayer] = []
    layers: dict[str, int] = {}
    read: dict[torch.nn.Module, BuiltLayer] = {}
    for name, module in cached.items():
        block, around = _block(module, parents)
        if block not in read:
            read[block] = _read(block, around, settings)
        if read[block] not in kinds:
            kinds.append(read[block])
        layers[name] = kinds.index(read[block])
    return BuiltLayers(kinds, layers)


def _parents(modules: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, tuple[torch.nn.Module, str]]:
    """Return the parent of each module of the model, and its name there.

    vLLM does not give its model to connectors. A caller holds it: the model runner that registers the caches, or the
    worker that wakes up. It holds a draft model too.
    """
    wanted = set(modules)
    parents: dict[torch.nn.Module, tuple[torch.nn.Module, str]] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not wanted <= parents.keys():
        for root in _held(frame.f_locals.get("self"), depth=3, seen=set()):
            parents |= {child: (parent, name) for parent in root.modules() for name, child in parent.named_children()}
        frame = frame.f_back
    if missing := wanted - parents.keys():
        raise UnsupportedPairError(
            f"no caller of register_kv_caches holds {type(missing.pop()).__name__}, a cached layer: kvhma cannot read "
            "from the model what decides the cache; use a version of vLLM of docs/compatibility.md"
        )
    return parents


def _held(owner: object, depth: int, seen: set[int]) -> Iterator[torch.nn.Module]:
    """Yield the modules that an object holds, also in objects of vLLM that it holds, such as wrappers."""
    for value in list(getattr(owner, "__dict__", {}).values()):
        if isinstance(value, torch.nn.Module):
            yield value
        elif depth and type(value).__module__.startswith("vllm.") and id(value) not in seen:
            seen.add(id(value))
            yield from _held(value, depth - 1, seen)


def _block(
    module: torch.nn.Module, parents: Mapping[torch.nn.Module, tuple[torch.nn.Module, str]]
) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """Return the decoder layer of a cached layer, the entry of a list, and the modules around it."""
    way = [module]
    names = []
    while way[-1] in parents:
        parent, name = parents[way[-1]]
        way.append(parent)
        names.append(name)
    index = next((index for index, name in enumerate(names) if name.isdecimal()), min(1, len(names)))
    return way[index], way[index + 1 :]


def _read(block: torch.nn.Module, around: Iterable[torch.nn.Module], settings: Collection[str]) -> BuiltLayer:
    scalars: dict[str, Scalar] = {}
    tables: dict[str, list[Row]] = {}
    for path, module in block.named_modules():
        of_module = {f"{path}.{name}": _rows(table) for name, table in _tables(module)}
        tables |= of_module
        for name, value in _values(module):
            if isinstance(value, bool):
                # A CustomOp has several kernels for the same values, and its switches choose one.
                counts = name in settings or (bool(of_module) and not isinstance(module, CustomOp))
            else:
                counts = isinstance(value, float) and not of_module
            if counts:
                scalars[f"{path}.{name}"] = value if math.isfinite(value) else str(value)
    for module in around:  # scales of embeddings; tables that all layers share, in modules without weights
        children = ((name, child) for name, child in module.named_children() if not name.isdecimal())
        beside = {name: child for name, child in children if next(child.parameters(), None) is None}
        for path, source in {"": module, **beside}.items():
            prefix = ".".join(filter(None, (type(module).__name__, path)))
            tables |= {f"{prefix}.{name}": _rows(table) for name, table in _tables(source)}
            for name, value in _values(source):
                if isinstance(value, float):
                    scalars[f"{prefix}.{name}"] = value if math.isfinite(value) else str(value)
    return BuiltLayer(scalars, tables)


def _values(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, the numbers of its attention kernel, and derived tensors of one element."""
    yield from ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    for name in ("_k_scale_float", "_v_scale_float"):
        yield name, getattr(module, name, None)
    kernel = getattr(module, "impl", None)
    for name in ("scale", "logits_soft_cap"):
        value = getattr(kernel, name, None)
        yield f"impl.{name}", float(value) if isinstance(value, (int, float)) else None
    for name, value in _derived(module):
        if value.numel() == 1:
            yield name, float(value)


def _derived(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that vLLM computes when it builds the model: no file has them."""
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers[name]
        if buffer is not None and buffer.is_floating_point() and not buffer.is_meta:
            yield name, buffer


def _tables(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tables whose rows are positions. Only of modules without weights: others may derive a rank's share."""
    if next(module.parameters(), None) is None:
        yield from ((name, table) for name, table in _derived(module) if table.ndim == 2 and len(table) > 1)


def _rows(table: torch.Tensor) -> list[Row]:
    positions = [position for position in POSITIONS if position < len(table)]
    columns = sorted({index * (table.shape[1] - 1) // (COLUMNS - 1) for index in range(COLUMNS)})
    found = table[positions][:, columns].double().nan_to_num(0.0, 1e30, -1e30).cpu()  # JSON has no infinity
    return [[float(f"{entry:.5g}") for entry in row] for row in found.tolist()]
