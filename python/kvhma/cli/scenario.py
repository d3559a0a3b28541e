# SPDX-License-Identifier: Apache-2.0
"""The data of the demo: a cache in the layout of vLLM's hybrid allocator, and requests with scattered blocks."""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvhma.cli.block_tables import sequence_blocks
from kvhma.cli.hand_off import HandOff, RequestOptions, of_geometries
from kvhma.errors import RequestError
from kvhma.geometry import Geometry
from kvhma.models import Model
from kvhma.models.vllm_layout import LayoutOptions, layout

MAX_CACHE_BYTES = 768 << 20
"""Of one process; both caches and the copy for the check stay below 2 GiB."""
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model with a number of blocks, the requests, and the seed that chose them."""

    model: Model
    num_blocks: int
    requests: tuple[HandOff, ...]
    seed: int


def geometry_of(model: Model, num_blocks: int, base: int = 1 << 20) -> Geometry:
    """Make the geometry, with kernel blocks, aliased groups and padded state pages."""
    return layout(model, LayoutOptions(num_blocks=num_blocks, kernel_block="flashinfer", base=base))


def allocate(model: Model, num_blocks: int) -> tuple[Geometry, list[NDArray[np.uint8]], NDArray[np.uint8]]:
    """Allocate a cache.

    Returns:
        The geometry with real addresses, each region as uint8 ``(region.bytes,)``, and the array that owns them.
    """
    sketch = geometry_of(model, num_blocks)
    size = max(region.base + region.bytes for region in sketch.regions) - sketch.regions[0].base
    owner = np.zeros(size + 2 * _PAGE, dtype=np.uint8)
    start = int(owner.ctypes.data)
    geometry = geometry_of(model, num_blocks, -(-start // _PAGE) * _PAGE)
    views = [owner[region.base - start : region.base - start + region.bytes] for region in geometry.regions]
    return geometry, views, owner


def scenario(model: Model, tokens: int | None, count: int, seed: int) -> Scenario:
    """Make requests: a short prompt, a prefix hit, a prompt far beyond the window, then arbitrary requests.

    Args:
        model: the model.
        tokens: tokens of the longest prompt; None for a prompt far beyond the window and several blocks long.
        count: number of requests.
        seed: selects other blocks and bytes.

    Raises:
        RequestError: the cache for that many tokens would exceed the limit of the demo.
    """
    probe = geometry_of(model, 2)
    block = max(group.block_size for group in probe.groups if group.kind != "ssm")
    longest = _default_tokens(model, block) if tokens is None else tokens
    if (size := _cache_bytes(probe, longest)) > MAX_CACHE_BYTES:
        fits = bisect.bisect_right(range(1, longest), MAX_CACHE_BYTES, key=lambda n: _cache_bytes(probe, n))
        if tokens is not None or not fits:
            hint = f"try --tokens {fits}" if fits else "not even one token fits"
            raise RequestError(
                f"{model.name}: {longest} tokens need a cache of {size >> 20} MiB, at most {MAX_CACHE_BYTES >> 20} are "
                f"used; {hint}"
            )
        longest = fits
    num_blocks = _num_blocks(probe, longest)
    rng = random.Random(seed)  # noqa: S311 - block ids, not secrets
    shapes = [
        ("short prompt", min(longest, longest // 8 + 3), 0.0),
        ("prefix hit", max(1, longest // 2), 0.5),
        ("long prompt", longest, 0.0),
    ]
    while len(shapes) < count:
        shapes.append(("arbitrary", rng.randint(1, longest), rng.choice([0.0, 0.3, 0.7])))
    geometry = geometry_of(model, num_blocks)
    requests = (
        of_geometries(name, [geometry], [geometry], RequestOptions(n, int(hit * n), "used", rng.randrange(1 << 31)))
        for name, n, hit in shapes[:count]
    )
    return Scenario(model, num_blocks, tuple(requests), seed)


def _default_tokens(model: Model, block: int) -> int:
    window = model.window or min(model.chunk or 0, 1024)
    return max(2 * window, 2 * block, 512) + block // 2 + 5


def _num_blocks(probe: Geometry, tokens: int) -> int:
    """Return blocks for a prompt, and some more so that its ids are scattered."""
    groups = len(probe.groups)
    return (sum(map(len, sequence_blocks(probe, tokens))) + groups) * 5 // 4 + 2


def _cache_bytes(probe: Geometry, tokens: int) -> int:
    """Return the bytes of a cache that holds a prompt; `probe` has two blocks."""
    return sum(region.bytes for region in probe.regions) // 2 * _num_blocks(probe, tokens)
