# SPDX-License-Identifier: Apache-2.0
"""Caches in torch tensors: one buffer for a block's bytes over all layers, and geometries of tensors as they are.

:func:`allocate` makes the buffers of a hybrid model and hands every layer a view of its own in them;
:func:`geometry_from_tensors` describes views that somebody else made. docs/torch.md has both with examples.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401 - the package of that name, not this one
except ImportError as error:
    raise ImportError("kvhma.torch needs torch: pip install 'kvhma[torch]'") from error

from kvhma.hybrid import LayoutError
from kvhma.torch.arrange import BufferKind
from kvhma.torch.attention import AttentionSpec, MLASpec
from kvhma.torch.cache import Buffer, Cache, allocate
from kvhma.torch.memory import AllocationError
from kvhma.torch.models import model_specs
from kvhma.torch.plots import Spec
from kvhma.torch.references import Chunk, DataReference, References, TensorReference
from kvhma.torch.shard import Shard
from kvhma.torch.state import ConvPart, OpaqueSpec, StateSpec
from kvhma.torch.tensors import LayerTensors, TensorPart, geometry_from_tensors
from kvhma.torch.views import View

__all__ = [
    "AllocationError",
    "AttentionSpec",
    "Buffer",
    "BufferKind",
    "Cache",
    "Chunk",
    "ConvPart",
    "DataReference",
    "LayerTensors",
    "LayoutError",
    "MLASpec",
    "OpaqueSpec",
    "References",
    "Shard",
    "Spec",
    "StateSpec",
    "TensorPart",
    "TensorReference",
    "View",
    "allocate",
    "geometry_from_tensors",
    "model_specs",
]
