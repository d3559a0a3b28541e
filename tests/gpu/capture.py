# SPDX-License-Identifier: Apache-2.0
"""Graphs are captured while a thread works: ``python -m gpu.capture DEVICE WHAT``. The last line is what was found."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from gpu.place import PAGE, Place, Worker, busy, connected, done, rows_of, wait
from kvhma.vllm.device.memory import DeviceMemory

BESIDE = ("notifications", "reads", "zeroing", "handshakes")
"""What the thread does."""

GOOD = "good"


def main() -> None:
    place, what = Place(sys.argv[1]), sys.argv[2]
    with connected(place, 256) as (p, d, peer):
        memory = DeviceMemory(d.geometry, {"layer": d.content})
        rows = rows_of(place.region(d.content), range(0, 200, 2))

        def shake_hands() -> None:
            other = Worker(place, place.zeros(PAGE))
            other.agent.connect(p.payload())
            other.agent.close()

        works: tuple[Callable[[], object], ...] = (
            d.agent.notifications,
            lambda: done(d.read(peer, range(0, 200, 2), range(0, 200, 2))),
            lambda: wait(memory.zero(rows)),
            shake_hands,
        )
        with _working(memory.device.chosen(works[BESIDE.index(what)])) as errors:
            time.sleep(0.2)
            captured = [_capture(place) for _ in range(5)]
        failed = [text for text in captured if text] + [f"in the thread: {error}" for error in errors]
    print(failed[0].splitlines()[0][:200] if failed else GOOD)


@contextlib.contextmanager
def _working(work: Callable[[], object]) -> Iterator[list[BaseException]]:
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


def _capture(place: Place) -> str | None:
    if place.is_host:
        return None
    try:
        busy(place)()
        place.settle()
    except RuntimeError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main()
