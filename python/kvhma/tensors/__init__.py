# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to a geometry: :func:`geometry_from_tensors` describes an engine's views.

docs/torch.md has an example.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401 - absolute: the package of that name
except ImportError as error:
    raise ImportError("kvhma.tensors and kvhma.torch need torch: pip install torch") from error

from kvhma.tensors.geometry import LayerTensors, RankOptions, TensorPart, geometry_from_tensors
from kvhma.tensors.permuting import permute
from kvhma.tensors.zeroing import clear

__all__ = ["LayerTensors", "RankOptions", "TensorPart", "clear", "geometry_from_tensors", "permute"]
