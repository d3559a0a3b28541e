# SPDX-License-Identifier: Apache-2.0
"""Reads from the modules of a loaded model what decides the values in its caches, besides the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp

from kvhma.errors import UnsupportedPairError
from kvhma.vllm.callers import caller_variables
from kvhma.vllm.wire.built_layers import COLUMNS, POSITIONS, BuiltLayer, BuiltLayers, Row, Scalar

_TablesOf = Callable[[torch.nn.Module], dict[str, list[Row]]]


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
    # Layers share the modules around them, and tables.
    tables_of = cache(_read_tables)
    beside = cache(partial(_read_beside, tables_of=tables_of))
    read = cache(partial(_read_block, settings=settings, tables_of=tables_of))
    for name, module in cached.items():
        block, around = _block(module, parents)
        parts = [read(block), *map(beside, around)]
        kind = BuiltLayer(
            {field: value for part in parts for field, value in part.scalars.items()},
            {field: table for part in parts for field, table in part.tables.items()},
        )
        if kind not in kinds:
            kinds.append(kind)
        layers[name] = kinds.index(kind)
    return BuiltLayers(kinds, layers)


def _parents(modules: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, tuple[torch.nn.Module, str]]:
    """Return the parent of each module of the model, and its name there."""
    wanted = set(modules)
    parents: dict[torch.nn.Module, tuple[torch.nn.Module, str]] = {}
    for root in held_modules():
        if wanted <= parents.keys():
            break
        parents |= {child: (parent, name) for parent in root.modules() for name, child in parent.named_children()}
    if missing := wanted - parents.keys():
        raise UnsupportedPairError(
            f"no caller of register_kv_caches holds {type(missing.pop()).__name__}, a cached layer: kvhma cannot read "
            "from the model what decides the cache; use a version of vLLM of docs/compatibility.md"
        )
    return parents


def held_modules() -> Iterator[torch.nn.Module]:
    """Yield the modules that callers hold.

    vLLM does not give its model to connectors. A caller holds it: the model runner that registers the caches, or the
    worker that wakes up. It holds a draft model too.
    """
    for variables in caller_variables():
        yield from _held(variables.get("self"), depth=3, seen=set())


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


def _read_block(block: torch.nn.Module, settings: Collection[str], tables_of: _TablesOf) -> BuiltLayer:
    """Read a decoder layer."""
    scalars: dict[str, Scalar] = {}
    tables: dict[str, list[Row]] = {}
    for path, module in block.named_modules():
        own = tables_of(module)
        tables |= {f"{path}.{name}": rows for name, rows in own.items()}
        for name, value in _values(module):
            if isinstance(value, bool):
                # A CustomOp has several kernels for the same values, and its switches choose one.
                counts = name in settings or (bool(own) and not isinstance(module, CustomOp))
            else:
                counts = isinstance(value, float) and not own
            if counts:
                scalars[f"{path}.{name}"] = _finite(value)
    return BuiltLayer(scalars, tables)


def _read_beside(module: torch.nn.Module, tables_of: _TablesOf) -> BuiltLayer:
    """Read a module around decoder layers: scales of embeddings, and tables of its children without weights."""
    scalars: dict[str, Scalar] = {}
    tables: dict[str, list[Row]] = {}
    children = ((name, child) for name, child in module.named_children() if not name.isdecimal())
    beside = {name: child for name, child in children if next(child.parameters(), None) is None}
    for path, source in {"": module, **beside}.items():
        prefix = ".".join(filter(None, (type(module).__name__, path)))
        tables |= {f"{prefix}.{name}": rows for name, rows in tables_of(source).items()}
        scalars |= {f"{prefix}.{name}": _finite(value) for name, value in _values(source) if isinstance(value, float)}
    return BuiltLayer(scalars, tables)


def _finite(value: float) -> float | str:
    """Return a number as it is, or as a text if JSON has no number for it."""
    return value if math.isfinite(value) else str(value)


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
    if "dynamic" in str(getattr(module, "rope_type", None)):
        # Beyond this length transformers computes the frequencies anew for each step.
        yield "original_max_seq_len", float(vars(module)["original_max_seq_len"])


def _derived(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that vLLM computes when it builds the model: no file has them."""
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers[name]
        if buffer is not None and buffer.is_floating_point() and not buffer.is_meta:
            yield name, buffer


def _read_tables(module: torch.nn.Module) -> dict[str, list[Row]]:
    """Read tables whose rows are positions. Only of modules without weights: others may derive a rank's share."""
    if next(module.parameters(), None) is not None:
        return {}
    return {name: _rows(table) for name, table in _derived(module) if table.ndim == 2 and len(table) > 1}


def _rows(table: torch.Tensor) -> list[Row]:
    positions = [position for position in POSITIONS if position < len(table)]
    columns = sorted({index * (table.shape[1] - 1) // (COLUMNS - 1) for index in range(COLUMNS)})
    found = table[positions][:, columns].double().nan_to_num(0.0, 1e30, -1e30).cpu()  # JSON has no infinity
    return [[float(f"{entry:.5g}") for entry in row] for row in found.tolist()]
