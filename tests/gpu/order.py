# SPDX-License-Identifier: Apache-2.0
"""The steps about streams, graphs and memory: what the connector does beside an engine's work."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from gpu.place import PAGE, Outcome, Place, Worker, connected, done, in_fresh_thread, rows_of, seconds_of
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Span
from kvhma.vllm.device.memory import DeviceMemory
from kvhma.vllm.device.slots import SlotRanges
from kvhma.vllm.device.staging import StagingPool

_STEP_SECONDS = 0.01


def wait(launched: torch.Event | None) -> None:
    """Wait as a loading thread does, but with shorter pauses."""
    while launched is not None and not launched.query():
        time.sleep(1e-5)


def busy(place: Place) -> Callable[[], object]:
    """Return what launches the work of about one step: a graph on a device, a pause on the host."""
    if place.is_host:
        return lambda: None
    side = torch.randn(4096, 4096, device=place.device, dtype=torch.bfloat16)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(side, side)

    multiply(3)
    place.settle()
    each = seconds_of(lambda: (multiply(20), place.settle())) / 20
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(max(1, round(_STEP_SECONDS / each)))
    return graph.replay


def zeroing(place: Place, outcome: Outcome) -> None:
    """Zero 12, 61 and 94 rows beside steps: as a load does, and row by row with a wait for the device."""
    pages = 4096
    content = place.zeros(pages * PAGE)
    memory = DeviceMemory(place.geometry(content), {"layer": content})
    step = busy(place)
    region = place.region(content)
    for count in (12, 61, 94):
        rows = rows_of(region, range(0, 40 * count, 40), PAGE - 8)
        content.fill_(1)
        place.settle()
        mark = memory.device.mark()
        step()

        def zero(rows: np.ndarray = rows, mark: torch.Event | None = mark) -> None:
            wait(memory.zero(rows, mark))

        outcome.time(f"{count} rows beside a step", in_fresh_thread(memory.device.chosen(partial(seconds_of, zero))))
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
        outcome.time(f"{count} rows, row by row and the device waited for", waited)
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


@contextlib.contextmanager
def working(work: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Call it again and again in a thread; yield its exceptions."""
    ended, errors = threading.Event(), []

    def run() -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield errors
    finally:
        ended.set()
        thread.join()


def capturing(place: Place, outcome: Outcome) -> None:
    """Capture graphs while a thread reads, zeroes or does a handshake: calls that would end a capture must wait."""
    with connected(place, 256) as (p, d, peer):
        memory = DeviceMemory(d.geometry, {"layer": d.content})
        rows = rows_of(place.region(d.content), range(0, 200, 2))

        def shake_hands() -> None:
            other = Worker(place, place.zeros(PAGE))
            other.agent.connect(p.payload())
            other.agent.close()

        for what, work in {
            "notifications": d.agent.notifications,
            "reads": lambda: done(d.read(peer, range(0, 200, 2), range(0, 200, 2))),
            "zeroing": lambda: wait(memory.zero(rows)),
            "handshakes": shake_hands,
        }.items():
            with working(memory.device.chosen(work)) as errors:
                time.sleep(0.2)
                captured = [_capture(place) for _ in range(5)]
            failed = [text for text in captured if text] + [f"in the thread: {error}" for error in errors]
            outcome.add(f"capture beside {what}", "good" if not failed else failed[0][:200])
            # Before graphs are captured the connector's threads do nothing else.
            assert not failed or what != "notifications"


def _capture(place: Place) -> str | None:
    if place.is_host:
        return None
    try:
        busy(place)()
        place.settle()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


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
    cache.zero_()
    mark = made.device.mark()
    outcome.time("blocks to the device", seconds_of(lambda: wait(made.copy_in(places, spans, mark))), nbytes)
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
