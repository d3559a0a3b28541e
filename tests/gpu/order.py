# SPDX-License-Identifier: Apache-2.0
"""The steps about streams, graphs and memory: what the connector does beside an engine's work."""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import partial

import numpy as np
import torch

from gpu.capture import BESIDE, GOOD
from gpu.place import (
    PAGE,
    Outcome,
    Place,
    busy,
    connected,
    done,
    environment,
    in_fresh_thread,
    rows_of,
    seconds_of,
    wait,
)
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Span
from kvhma.vllm.device.memory import DeviceMemory
from kvhma.vllm.options.staging.pool import StagingPool
from kvhma.vllm.options.staging.slots import SlotRanges


def zeroing(place: Place, outcome: Outcome) -> None:
    """Zero 12, 61 and 94 rows beside steps: as a load does, and row by row with a wait for the device."""
    pages = 4096
    content = place.zeros(pages * PAGE)
    memory = DeviceMemory(place.geometry(content), {"layer": content})
    step = busy(place)
    region = place.region(content)
    for count, what in ((12, "the first 12 rows"), (12, "12 rows"), (61, "61 rows"), (94, "94 rows")):
        rows = rows_of(region, range(0, 40 * count, 40), PAGE - 8)
        content.fill_(1)
        place.settle()
        mark = memory.device.mark()
        step()

        def zero(rows: np.ndarray = rows, mark: torch.Event | None = mark) -> None:
            wait(memory.zero(rows, mark))

        outcome.time(f"{what} beside a step", in_fresh_thread(memory.device.chosen(partial(seconds_of, zero))))
        place.settle()
        pieces = content.view(-1, PAGE)
        assert not pieces[: 40 * count : 40, : PAGE - 8].any()
        assert int(pieces.sum()) == pages * PAGE - count * (PAGE - 8)
        step()

        def row_by_row(count: int = count) -> None:
            for index in range(count):
                content[40 * index * PAGE : 40 * index * PAGE + PAGE - 8].zero_()
            place.settle()

        waited = in_fresh_thread(memory.device.chosen(partial(seconds_of, row_by_row)))
        outcome.time(f"{what}, row by row and the device waited for", waited)
    _zero_then_read_then_kernel(place, outcome)


def _zero_then_read_then_kernel(place: Place, outcome: Outcome) -> None:
    """A step writes late, then a load zeroes and reads, then the next step uses it: nothing may overtake."""
    step = busy(place)
    with connected(place, 64) as (p, d, peer):
        memory = DeviceMemory(d.geometry, {"layer": d.content})
        rounds, early = place.size(50, 5), 0
        for _ in range(rounds):
            step()
            d.content.fill_(7)  # by an earlier step
            mark = memory.device.mark()
            step()
            later = memory.device.mark()
            wait(memory.zero(rows_of(place.region(d.content), range(32)), mark))
            done(d.read(peer, range(16), range(16)))
            early += later is not None and not later.query()
            found = d.content.clone().view(-1, PAGE)  # by the next step
            place.settle()
            assert torch.equal(found[:16], p.content.view(-1, PAGE)[:16])
            assert not found[16:32].any()
            assert (found[32:] == 7).all()
    outcome.add("zero, read and use in order", "always")
    outcome.add("loads that ended before the step launched after them", f"{early} of {rounds}")


def capturing(place: Place, outcome: Outcome) -> None:
    """Capture graphs while a thread reads, zeroes or does a handshake, each in a process: UCX may end the process."""
    command = [sys.executable, "-m", "gpu.capture", str(place.device)]
    children = {
        what: subprocess.Popen(
            [*command, what], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        for what in BESIDE
    }
    for what, child in children.items():
        said, _ = child.communicate()
        last = said.splitlines()[-1] if said.strip() else ""
        outcome.add(f"capture beside {what}", last if not child.returncode else f"ends the process: {last[-160:]}")
        # Before graphs are captured the connector's threads do nothing else.
        assert what != "notifications" or last == GOOD, said[-600:]


def staging(place: Place, outcome: Outcome) -> None:
    """Copy blocks to the host and back."""
    blocks, heads = place.size(2_048, 64), 8
    shape = (blocks, heads, 16, 128)
    cache = torch.randn(shape, dtype=torch.float32, device=place.device).to(torch.bfloat16)
    ids = list(range(1, blocks, 2))
    made = StagingPool(_attention(place, cache), {"layer": cache}, SlotRanges.of(0, len(ids)))
    nbytes = len(ids) * cache[0].nbytes
    spans = [Span(0, ids)]
    places = made.take_places(spans)
    assert places is not None
    made.copy_out(spans, places)
    outcome.time("blocks to the host", seconds_of(lambda: made.copy_out(spans, places)), nbytes)
    before = cache.clone()
    for what in ("the first blocks to the device", "blocks to the device"):
        cache.zero_()
        mark = made.device.mark()
        outcome.time(what, seconds_of(lambda mark=mark: wait(made.copy_in(places, spans, mark))), nbytes)
        place.settle()
        assert torch.equal(cache[ids], before[ids])
        assert not cache[::2].any()


def _attention(place: Place, view: torch.Tensor) -> Geometry:
    blocks, heads, tokens, content = view.shape
    axes = (
        Axis("heads", heads, view.stride(1) * 2),
        Axis("tokens", tokens, view.stride(2) * 2),
        Axis("content", content, 2),
    )
    page = view.stride(0) * 2
    layer = Layer("layer", 0, 0, 0, blocks, page, Page((Part("kv", "bfloat16", 2, 0, axes),)))
    return Geometry((place.region(view),), (Group("full", tokens),), (layer,))


def many_loads(place: Place, outcome: Outcome) -> None:
    """Zero and read 2,000 times: neither the process nor the device may hold more after it."""
    with connected(place, 1_024) as (_, d, peer):
        memory = DeviceMemory(d.geometry, {"layer": d.content})
        region = place.region(d.content)

        def load(number: int) -> None:
            first = number * 8 % 1_000
            wait(memory.zero(rows_of(region, range(first, first + 16, 2)), memory.device.mark()))
            done(d.read(peer, range(first, first + 16, 2), range(first, first + 16, 2)))

        loads = place.size(2_000, 200)
        for number in range(loads // 4):
            load(number)
        before = _held(place)
        seconds = seconds_of(lambda: [load(number) for number in range(loads)])
        after = _held(place)
    outcome.time("one load", seconds / loads)
    for what, most in (("process", 16 << 20), ("device", 2 << 20)):
        grown = after[what] - before[what]
        outcome.add(f"growth of the {what} in {loads:,} loads", f"{grown / 2**20:.1f} MiB")
        assert grown <= most, f"the {what} has grown by {grown} bytes"


def _held(place: Place) -> dict[str, int]:
    if place.is_host:
        used = 0
    else:
        free, total = torch.cuda.mem_get_info(place.device)
        used = total - free
    return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "device": used}
