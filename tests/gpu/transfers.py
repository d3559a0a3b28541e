# SPDX-License-Identifier: Apache-2.0
"""The steps about NIXL and UCX: what they know of the device, and what reads cost."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

import kvhma
from gpu.place import PAGE, SECONDS, Outcome, Owner, Place, Worker, connected, done, environment
from kvhma.errors import KvhmaError
from kvhma.geometry import Geometry
from kvhma.nixl import Agent, Peer
from kvhma.oracle import Request, check_memory, fill_source, fill_stale
from kvhma.tensors.storages import Storages
from support.generate import Case, generate
from support.recipe import draw

_TRANSPORTS = r"\b(cuda_ipc|cuda_copy|gdr_copy|rocm_ipc|rocm_copy|rc_mlx5|rc_verbs|dc_mlx5|tcp|cma|sysv|posix|self)\b"


def facts(place: Place, outcome: Outcome) -> None:
    """Report the devices, the transports of UCX, and whether processes can map each other's device memory."""
    outcome.add("machine", f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    outcome.add("torch", torch.__version__)
    if not place.is_host:
        properties = torch.cuda.get_device_properties(place.device)
        outcome.add("device", f"{properties.name}, {properties.total_memory >> 30} GiB")
        outcome.add("memory of one process mapped in another", _mapped(place))
    _, said = read_in_another_process(place, 64, choose=True, scratch=True)
    found = sorted(set(re.findall(_TRANSPORTS, said)))
    outcome.add("transports that UCX names for a read of another process", ", ".join(found) or "it names none")


def _mapped(place: Place) -> str:
    tensor = place.labelled(PAGE)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_sum_of, args=(theirs,), daemon=True)
    process.start()
    try:
        ours.send(reduce_tensor(tensor))
        if not ours.poll(SECONDS):
            return "no: no answer"
        found = ours.recv()
        return "yes" if found == int(tensor.sum()) else f"no: {found}"
    finally:
        process.kill()


def _sum_of(pipe: Connection) -> None:
    try:
        rebuild, arguments = pipe.recv()
        pipe.send(int(rebuild(*arguments).sum()))
    except Exception as error:  # any exception is an answer
        pipe.send(f"{type(error).__name__}: {error}")


def read_in_another_process(
    place: Place, pages: int, *, choose: bool, scratch: bool, variables: Mapping[str, str] | None = None
) -> tuple[dict[str, float], str]:
    """Let a process read from this one's child, both with these variables; return its times and its standard error."""
    words = ["yes" if word else "no" for word in (choose, scratch)]
    variables = variables or {}
    with Owner(place, pages, **variables) as owner:
        child = subprocess.run(
            [sys.executable, "-m", "gpu.reader", str(place.device), str(pages), *words],
            input=f"{owner.payload.hex()}\n",
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment(UCX_PROTO_INFO="y", **variables),
            check=False,
        )
    if child.returncode:
        raise AssertionError(f"the reader ended with {child.returncode}: {child.stderr[-600:]}")
    return json.loads(child.stdout), child.stderr


def rows_in_one_process(place: Place, outcome: Outcome) -> None:
    """Read 1 to 10,000 rows that cannot be merged; every byte and NIXL's telemetry must equal the request."""
    most = place.size(10_000, 1_000)
    with connected(place, 2 * most) as (p, d, peer):
        count = 1
        while count <= most:
            pages = list(range(0, 2 * count, 2))
            d.content.zero_()
            place.settle()
            started = time.perf_counter()
            read = done(d.read(peer, pages, pages[::-1]))
            outcome.time(f"{count:,} rows of 4 KiB", time.perf_counter() - started, count * PAGE)
            assert read.telemetry is not None
            assert (read.telemetry.descriptors, read.telemetry.nbytes) == (count, count * PAGE)
            ours, theirs = d.content.view(-1, PAGE), p.content.view(-1, PAGE)
            assert torch.equal(ours[pages], theirs[pages[::-1]])
            assert not ours[1::2].any()
            count *= 10


def two_processes(place: Place, outcome: Outcome) -> None:
    """Read from another process: with the device chosen and without, with memory there to warm up in and without.

    Also with variables that make UCX use TCP for device memory.
    """
    pages = place.size(65_536, 1_024)
    named = "device chosen, warmed up on it"
    slow = {} if place.is_host else {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "auto"}
    segments = {} if place.is_host else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for what, choose, scratch, variables in (
        (named, True, True, {}),
        ("device chosen, by a message", True, False, {}),
        ("not chosen, warmed up on it", False, True, {}),
        (f"{named}, UCX's own choice", True, True, slow),
        (f"{named}, expandable segments", True, True, segments),
    ):
        try:
            found, said = read_in_another_process(place, pages, choose=choose, scratch=scratch, variables=variables)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            if choose and not variables:
                raise
            outcome.add(what, f"failed: {error}")
            continue
        assert found["equal"], what
        for name in ("handshake", "first read", "second read"):
            outcome.time(f"{name}, {what}", found[name])
        outcome.time(f"{pages * PAGE >> 20} MiB, {what}", found["all"], pages * PAGE)
        outcome.add(f"transports, {what}", ", ".join(sorted(set(re.findall(_TRANSPORTS, said)))) or "none named")


def byte_oracle(place: Place, outcome: Outcome) -> None:
    """Read by the plans of generated engines, and check every byte of D."""
    right = 0
    for seed in range(place.size(24, 4)):
        case = generate(seed, draw(seed))
        if len(case.remotes) == 1 and _plan_is_right(place, case, seed):
            right += 1
    assert right
    outcome.add("plans whose every byte was right", right)


def _plan_is_right(place: Place, case: Case, seed: int) -> bool:
    """Fill both sides on the host, move what the plan lists on the device, and check it on the host."""
    (remote,) = case.remotes
    request = (case.num_tokens, case.local_spans, case.remote_spans)
    sides = []
    for geometry in (case.local, remote):
        host = [np.zeros(region.bytes, np.uint8) for region in geometry.regions]
        tensors = [place.zeros(region.bytes) for region in geometry.regions]
        regions = tuple(place.region(tensor) for tensor in tensors)
        sides.append((replace(geometry, regions=regions), host, tensors))
    (local, d_host, d_tensors), (source, p_host, p_tensors) = sides
    fill_stale(d_host, seed=seed)
    fill_source(p_host, source, case.spans_of(0), seed=seed)
    for host, tensors in ((d_host, d_tensors), (p_host, p_tensors)):
        for array, tensor in zip(host, tensors, strict=True):
            tensor.copy_(torch.from_numpy(array))
    moved = kvhma.plan(local, (source,)).transfer(*request)
    storages = Storages({str(index): tensor for index, tensor in enumerate(d_tensors)})
    torch._foreach_zero_(storages.pieces(moved.zero) or [place.zeros(1)])
    place.settle()
    with _agents(place, local, source) as (agent, peer):
        for read in moved.reads:
            handle = agent.read(peer, read.local, read.remote, local_memory=place.memory, remote_memory=place.memory)
            done(handle)
            assert handle.telemetry is not None
            assert (handle.telemetry.descriptors, handle.telemetry.nbytes) == (read.descriptors, read.bytes)
    place.settle()
    for array, tensor in zip(d_host, d_tensors, strict=True):
        array[:] = tensor.cpu().numpy()
    check_memory(
        d_host,
        local,
        (source,),
        Request(case.num_tokens, case.local_spans, case.remote_spans),
        excess_bytes=moved.excess_bytes,
        seed=seed,
    )
    return True


@contextlib.contextmanager
def _agents(place: Place, local: Geometry, remote: Geometry) -> Iterator[tuple[Agent, Peer]]:
    """Yield an agent over one geometry and, as its peer, one over the other."""
    with Agent("oracle-d") as d, Agent("oracle-p") as p:
        scratch = place.zeros(PAGE)
        if not place.is_host:
            d.register_scratch(place.region(scratch))
        d.register(local)
        p.register(remote)
        yield d, d.connect(p.handshake_payload(remote))


def post_cost(place: Place, outcome: Outcome) -> None:
    """Post rows, and the same as ids of prepared lists, to another process; a transport may copy inside the post."""
    for count in (1_000, 10_000, 40_000) if not place.is_host else (1_000,):
        pages = list(range(0, 2 * count, 2))
        ids = np.asarray(pages, dtype=np.int32)
        worker = Worker(place, place.zeros(2 * count * PAGE))
        with Owner(place, 2 * count) as owner:
            peer = worker.agent.connect(owner.payload)
            views = [
                np.array([(region.base, PAGE, region.device, PAGE, 2 * count)], np.uint64)
                for region in (place.region(worker.content), peer.geometry.regions[0])
            ]
            ours = worker.agent.prepare(None, views[0], place.memory)
            theirs = worker.agent.prepare(peer, views[1], place.memory)
            posts = {
                "rows": partial(worker.read, peer, pages, pages),
                "ids": partial(worker.agent.read_ids, ours, ids, theirs, ids),
            }
            for what, post in posts.items():
                done(post())  # so that neither has anything to set up
                started = time.perf_counter()
                read = post()
                posted = time.perf_counter() - started
                done(read)
                outcome.time(f"{count:,} {what}: post", posted)
                outcome.time(f"{count:,} {what}: read", time.perf_counter() - started, count * PAGE)
        place.settle()
        expected = place.labelled(2 * count * PAGE)
        assert torch.equal(worker.content.view(-1, PAGE)[pages], expected.view(-1, PAGE)[pages])
        worker.agent.close()


def killed_peer(place: Place, outcome: Outcome) -> None:
    """Kill P while D reads from it: the read ends with an error or with the bytes, and D reads from another P."""
    pages = place.size(262_144, 8_192)
    worker = Worker(place, place.zeros(pages * PAGE))
    first, second = Owner(place, pages), Owner(place, pages)
    with first, second:
        peer = worker.agent.connect(first.payload)
        handles = [worker.read(peer, [0], [0], pages * PAGE) for _ in range(4)]
        first.kill()
        started = time.perf_counter()
        ended = []
        for handle in handles:
            try:
                ended.append("read" if handle.wait(SECONDS) else "still running")
            except KvhmaError as error:
                ended.append(type(error).__name__)
        outcome.add("four reads of a P that was killed", ", ".join(ended))
        outcome.time("from its end to theirs", time.perf_counter() - started)
        assert all(handle.finished for handle in handles), "the transport never reports the loss"
        other = worker.agent.connect(second.payload)
        done(worker.read(other, [0], [0], pages * PAGE))
        place.settle()
        assert torch.equal(worker.content, place.labelled(pages * PAGE))
    worker.agent.close()
