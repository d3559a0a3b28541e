# SPDX-License-Identifier: Apache-2.0
"""The step about digests of what blocks hold: the device has the sums that the host has of the same bytes."""

from __future__ import annotations

import random
import time
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.place import Outcome, Place
from kvhma.digests import ContentDigest, content_digest, differences
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.vllm.device.memory import DeviceMemory

_TOKENS, _HEADS, _CONTENT = 64, 8, 128
_PAGE = _TOKENS * _HEADS * _CONTENT * 2


def summing(place: Place, outcome: Outcome) -> None:
    """Sum blocks where they are and on the host, in two layouts; one flipped bit of each differs."""
    blocks = place.size(2048, 64)
    content = torch.randint(0, 256, (blocks * _PAGE,), dtype=torch.uint8, device=place.device)
    ids = random.Random(0).sample(range(1, blocks), blocks // 2)
    for name, of_token, of_content in (
        ("heads outside of tokens", 2 * _CONTENT, 2),
        ("tokens innermost", 2, 2 * _TOKENS),
    ):
        geometry = _geometry(place.region(content), (2 * _TOKENS * _CONTENT, of_token, of_content), blocks)
        memory = DeviceMemory(geometry, {"cache": content})
        there = _digest(geometry, memory, ids)  # so that nothing has to be set up
        started = time.monotonic()
        there = _digest(geometry, memory, ids)
        outcome.time(f"sum of blocks, {name}", time.monotonic() - started, len(ids) * _PAGE)
        here = content_digest(geometry, partial(_from, content.cpu().numpy()), _TOKENS * len(ids), [Span(0, ids)], 7)
        assert there == here
        content[ids[3] * _PAGE + 5] ^= 4
        found, _ = differences(here, _digest(geometry, memory, ids), 7)
        assert [str(one) for one in found] == ["full layers, tokens 0..1023"]
        content[ids[3] * _PAGE + 5] ^= 4


def _from(host: NDArray[np.uint8], _: int, offset: int) -> NDArray[np.uint8]:
    return host[offset:]


def _digest(geometry: Geometry, memory: DeviceMemory, ids: list[int]) -> ContentDigest:
    def bytes_from(region: int, offset: int) -> torch.Tensor:
        return memory.from_address(geometry.regions[region].base + offset)

    return content_digest(geometry, bytes_from, _TOKENS * len(ids), [Span(0, ids)], 7)


def _geometry(region: Region, strides: tuple[int, int, int], blocks: int) -> Geometry:
    lengths = {"heads": _HEADS, "tokens": _TOKENS, "content": _CONTENT}
    axes = tuple(Axis(name, length, stride) for (name, length), stride in zip(lengths.items(), strides, strict=True))
    page = Page((Part("kv", "bfloat16", 2, 0, axes),))
    return Geometry((region,), (Group("full", _TOKENS),), (Layer("a", 0, 0, 0, blocks, _PAGE, page),))
