# SPDX-License-Identifier: Apache-2.0
"""The step about copies: rows of another process's memory in one launch, beside NIXL's reads of the same rows."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from gpu.place import PAGE, SECONDS, Outcome, Place, Worker, device_object, done, rows_of, seconds_of, wait
from kvhma.tensors.copying import Extents, copy_rows, launch_copy
from kvhma.vllm.options.copies.offers import map_offer, read_offer, share

CONFIRM = 64


def copying(place: Place, outcome: Outcome) -> None:
    """Copy 512 MiB in 131,072 rows in random order, twice; every byte must be right."""
    count = place.size(131_072, 2_000)
    rounds = list(in_turns(place, count, 2))
    for number, seconds in zip(("first", "second"), rounds, strict=True):
        for name in ("copy", "rows"):
            outcome.time(f"{count:,} rows of 4 KiB, {name}, {number} round", seconds[name], count * PAGE)
    outcome.add("NIXL's rows / copy", f"{rounds[1]['rows'] / rounds[1]['copy']:.1f}")


def in_turns(place: Place, count: int, rounds: int) -> Iterator[dict[str, float]]:
    """Yield the seconds of each way to read rows in random order from another process; all bytes are compared.

    `copy` includes the read through NIXL that follows a copy, `rows` and `ids` are NIXL's, and `floor` is one copy of
    as many bytes that are next to each other.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_owner, args=(theirs, str(place.device), count), daemon=True)
    process.start()
    try:
        assert ours.poll(SECONDS), "the other process has not started"
        payload, offer = ours.recv()
        source = map_offer(read_offer(offer), place.memory)
        worker = Worker(place, place.zeros(2 * count * PAGE))
        device, content, kind = device_object(place), worker.content, place.memory
        agent, peer = worker.agent, worker.agent.connect(payload)
        ids = [np.random.default_rng(seed).permutation(2 * count)[:count].astype(np.int32) for seed in (1, 2)]
        regions = place.region(content), peer.geometry.regions[0]
        rows = [rows_of(*of) for of in zip(regions, ids, strict=True)]
        lists = [
            agent.prepare(of, np.array([[region.base, PAGE, region.device, PAGE, 2 * count]], np.uint64), kind)
            for of, region in zip((None, peer), regions, strict=True)
        ]
        here = content.numpy() if place.is_host else content
        own = Extents([(content.data_ptr(), here)])
        expected = place.labelled(2 * count * PAGE).view(-1, PAGE)[ids[1]]
        confirm = [rows_of(*of, nbytes=CONFIRM)[:1] for of in zip(regions, ids, strict=True)]

        def read(local: np.ndarray, remote: np.ndarray) -> None:
            done(agent.read(peer, local, remote, local_memory=kind, remote_memory=kind))

        def copy() -> None:
            if place.is_host:
                copy_rows(own, source, *rows)
            else:
                wait(device.launch(lambda: launch_copy(own, source, *rows), device.mark()))
            read(*confirm)

        def floor() -> None:
            here[: count * PAGE] = source.contents[0][: count * PAGE]
            place.settle()

        ways: dict[str, Callable[[], object]] = {
            "copy": copy,
            "rows": lambda: read(*rows),
            "ids": lambda: done(agent.read_ids(lists[0], ids[0], lists[1], ids[1])),
            "floor": floor,
        }
        for _ in range(rounds):
            seconds = {}
            for name, way in ways.items():
                content.zero_()
                place.settle()
                seconds[name] = seconds_of(way)
                place.settle()
                assert name == "floor" or torch.equal(content.view(-1, PAGE)[ids[0]], expected), name
            yield seconds
        agent.close()
    finally:
        process.kill()
        process.join()


def _owner(connection: Connection, device: str, count: int) -> None:
    place = Place(device)
    content = place.labelled(2 * count * PAGE)
    offer = msgspec.json.encode(share([content]))
    worker = Worker(place, content)
    place.settle()
    connection.send((worker.payload(), offer))
    connection.recv()
