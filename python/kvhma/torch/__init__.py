# SPDX-License-Identifier: Apache-2.0
"""Caches in torch tensors: one buffer for a block's bytes over all layers.

:func:`allocate` makes the buffers of a hybrid model and gives every layer a view of its buffer. :mod:`kvhma.tensors`
describes caches that an engine has allocated itself. docs/torch.md has both with examples.
"""

from __future__ import annotations

import kvhma.tensors as _tensors  # noqa: F401 - first, because its error names what to install
from kvhma.models.vllm_layout import AllocatorOptions
from kvhma.torch.cache import Buffer, Cache, allocate
from kvhma.torch.models import model_specs
from kvhma.torch.placement import BufferKind
from kvhma.torch.references import DataReference, References, Segment, TensorReference
from kvhma.torch.specs import AttentionSpec, ConvPart, MLASpec, OpaqueSpec, Spec, StateSpec
from kvhma.torch.views import View

__all__ = [
    "AllocatorOptions",
    "AttentionSpec",
    "Buffer",
    "BufferKind",
    "Cache",
    "ConvPart",
    "DataReference",
    "MLASpec",
    "OpaqueSpec",
    "References",
    "Segment",
    "Spec",
    "StateSpec",
    "TensorReference",
    "View",
    "allocate",
    "model_specs",
]
