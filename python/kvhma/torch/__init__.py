# SPDX-License-Identifier: Apache-2.0
"""Caches in torch tensors: one buffer for a block's bytes over all layers.

:func:`allocate` makes the buffers of a geometry, as :func:`kvhma.models.vllm_layout.layout` returns it for a model, and
gives every layer a view of its buffer. :mod:`kvhma.tensors` describes caches that an engine has allocated itself.
docs/torch.md has both with examples.
"""

from __future__ import annotations

import kvhma.tensors as _tensors  # noqa: F401 - first, because its error names what to install
from kvhma.torch.buffers import BufferKind
from kvhma.torch.cache import Buffer, Cache, allocate
from kvhma.torch.views import View

__all__ = ["Buffer", "BufferKind", "Cache", "View", "allocate"]
