# SPDX-License-Identifier: Apache-2.0
"""Copies of rows between processes: the byte oracle over 2,000 plans, the device's kernel, and what is refused."""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")

import kvhma
from kvhma.errors import RequestError
from kvhma.oracle import Request, check_memory, fill_stale
from kvhma.tensors.copying import Extents, copy_rows
from kvhma.vllm.options.copies.offers import map_offer, read_offer
from support.generate import generate
from support.memory import empty, placed
from support.recipe import draw

ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
PLANS = (200, pytest.param(2000, marks=pytest.mark.long))


def rows(*found: tuple[int, int]) -> np.ndarray:
    return np.array([(address, length, 0) for address, length in found], np.uint64).reshape(-1, 3)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plans", PLANS)
def test_plans_between_two_processes(plans: int) -> None:
    moved = 0
    with subprocess.Popen(
        [sys.executable, "-m", "support.sharing_owner"],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        for seed in range(plans):
            case = generate(seed, draw(seed))
            print(seed, file=owner.stdin, flush=True)
            sources, extents = [], []
            for sketch, (offer, bases) in zip(case.remotes, json.loads(owner.stdout.readline()), strict=True):
                sources.append(placed(sketch, bases))
                extents.append(map_offer(read_offer(offer.encode()), "DRAM"))
            memory = empty(case.local)
            local = placed(case.local, (part.ctypes.data for part in memory))
            fill_stale(memory, seed=seed)
            spans = [case.spans_of(source) for source in range(len(sources))]
            transfer = kvhma.plan(local, sources).transfer(case.num_tokens, case.local_spans, spans)
            for address, nbytes, _ in transfer.zero.tolist():
                ctypes.memset(address, 0, nbytes)
            own = Extents((region.base, part) for region, part in zip(local.regions, memory, strict=True))
            for read in transfer.reads:
                copy_rows(own, extents[read.source], read.local, read.remote)
            asked = Request(case.num_tokens, case.local_spans, spans)
            report = check_memory(memory, local, sources, asked, excess_bytes=transfer.excess_bytes, seed=seed)
            moved += report.moved
        owner.stdin.close()
    assert moved > plans << 8


def drawn(rng: random.Random, count: int, unit: int) -> list[tuple[int, int, int]]:
    """Lengths, and places to write to and to read from, in units: the first ones do not overlap."""
    found, at = [], 0
    for _ in range(count):
        length = rng.choice([0, 1, 3, 16, 64, 64, 64, 4096 // unit, 70_000 // unit]) * unit
        at += rng.randrange(100) * unit
        found.append((length, at, rng.randrange(((1 << 20) - length) // unit) * unit))
        at += length
    rng.shuffle(found)
    return found


COPY = """
import torch
from kvhma.tensors.copying import launch_copy
from tensors.test_copying import check_drawn
check_drawn(launch_copy, torch.from_numpy)
print("copied")
"""


def check_drawn(copy, content_of) -> None:
    """Rows of many lengths between extents at addresses that are not theirs here, against a copy byte by byte."""
    for seed in range(10):
        rng = random.Random(seed)
        found = drawn(rng, 150, 1 << seed % 5)
        size = max(to + length for length, to, _ in found) + 1
        source = np.frombuffer(rng.randbytes(1 << 20), np.uint8).copy()
        target = np.frombuffer(rng.randbytes(size), np.uint8).copy()
        expected = bytearray(target)
        for length, to, start in found:
            expected[to : to + length] = bytes(source[start : start + length])
        half = size // 2  # no row crosses it: a extent is at least as long as the rows that begin in it
        cut = next(to for length, to, _ in sorted(found, key=lambda row: row[1]) if to >= half)
        own = Extents([(1 << 40, content_of(target[:cut])), ((1 << 40) + (1 << 30), content_of(target[cut:]))])
        local = rows(*((((1 << 40) + to) if to < cut else (1 << 40) + (1 << 30) + to - cut, n) for n, to, _ in found))
        remote = rows(*((7 + start, length) for length, _, start in found))
        copy(own, Extents([(7, content_of(source))]), local, remote)
        assert target.tobytes() == bytes(expected)


def test_rows_of_any_length_and_place() -> None:
    check_drawn(copy_rows, np.asarray)


def test_the_kernel_of_a_device_copies_the_same() -> None:
    pytest.importorskip("triton", reason="needs triton; make connector runs it")
    done = subprocess.run(
        [sys.executable, "-c", COPY], env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.strip() == "copied", done.stderr[-3000:]


@pytest.mark.parametrize(
    ("local", "remote", "why"),
    [
        ([(100, 8)], [(500, 9)], "row 0 has 8 local and 9 remote bytes"),
        ([(100, 8)], [(500, 8), (508, 8)], "1 local and 2 remote rows"),
        ([(99, 8)], [(500, 8)], "8 bytes at 0x63 is not in"),
        ([(157, 8)], [(500, 8)], "8 bytes at 0x9d is not in"),
        ([(100, 8)], [(596, 8)], "8 bytes at 0x254 is not in"),
        ([(100, 8)], [(0, 8)], "8 bytes at 0x0 is not in"),
        ([(100, 8), (100, 2**64 - 50)], [(500, 8), (500, 2**64 - 50)], "is not in"),
        ([(2**64 - 4, 8)], [(500, 8)], "is not in"),
    ],
)
def test_rows_outside_are_refused_and_nothing_is_copied(local, remote, why) -> None:
    target, source = np.zeros(64, np.uint8), np.ones(100, np.uint8)
    own, other = Extents([(100, target)]), Extents([(500, source)])
    with pytest.raises(RequestError, match=why):
        copy_rows(own, other, rows(*local), rows(*remote))
    assert not target.any()


def test_nothing_to_copy() -> None:
    copy_rows(Extents([(100, np.zeros(4, np.uint8))]), Extents([]), rows(), rows())
    assert not Extents([]).has(0, 1)
