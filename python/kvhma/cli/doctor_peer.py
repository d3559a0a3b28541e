# SPDX-License-Identifier: Apache-2.0
"""Checks of ``kvhma doctor --peer``: the path to another engine, as a decode engine of this host would take it."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvhma.cli.checks import Row
from kvhma.cli.format import duration, plural, size
from kvhma.cli.live_engine import Access, LiveWorker, ask_engine, ask_workers, connect, look_up
from kvhma.cli.subprocess import bytes_geometry, process, receive
from kvhma.errors import HandshakeError, HandshakeTimeoutError, KvhmaError
from kvhma.geometry import Geometry, Part

if TYPE_CHECKING:  # the connector's packages may not be installed
    from kvhma.vllm.config.identity import ModelIdentity
    from kvhma.vllm.peers.client import Client
    from kvhma.vllm.wire.messages import EngineInfo
    from kvhma.vllm.wire.params import Address

_QUESTIONS = 9
_READS = 20
_MAX_ROWS, _MAX_ROW_BYTES = 64, 1 << 20
"""Limits of a read: the number of runs, and bytes of each."""

_UP = (
    "start it; or its side_channel_host (VLLM_NIXL_SIDE_CHANNEL_HOST) is no address that this host reaches, or a "
    "firewall is between"
)


def look_at_peer(address: tuple[str, int], access: Access, *, read: bool) -> Iterator[Row]:
    """Run the checks one after the other, until one fails.

    Args:
        address: host and port of the engine's side channel.
        access: the secrets and settings to ask with.
        read: whether to read from the engine's caches, too.
    """
    try:
        began = time.perf_counter()
        numeric = look_up(address, access)
        yield Row("peer: name", "ok", f"{address[0]} is {numeric.host}, {_since(began)}")
        began = time.perf_counter()
        with connect(numeric, access) as client:
            yield _port(numeric, access, _since(began))
            info = ask_engine(client)
            yield _engine(client, info)
            yield from _advertised(address, info, access)
            began = time.perf_counter()
            workers = ask_workers(client, info, access)
            yield _handshake(workers, _since(began))
        yield from _models(workers)
        yield _geometries(workers)
        yield from _copies(workers, access)
    except HandshakeTimeoutError as error:
        yield Row("peer", "failed", str(error), _UP)
        return
    except HandshakeError as error:
        yield Row("peer", "failed", str(error), _fix(str(error)))
        return
    if read:
        yield _read(workers[0], numeric, access)


def _since(began: float) -> str:
    return duration(time.perf_counter() - began)


def _fix(text: str) -> str:
    if "allowed_prefill_engines" in text:
        return "add it there, if this engine may read from it"
    return "the same secret_file and the same version of kvhma on both hosts; the peer's log says more"


def _port(numeric: Address, access: Access, took: str) -> Row:
    from kvhma.vllm.config.net_devices import is_loopback

    if access.secrets.enabled:
        return Row("peer: port", "ok", f"{numeric} takes our secret (TLS 1.3), {took}")
    found = f"{numeric} is connected without a secret, {took}"
    if is_loopback(numeric.host):
        return Row("peer: port", "ok", found)
    fix = "secret_file or KVHMA_SECRET for both engines; kvhma's security page says how"
    return Row("peer: port", "note", f"{found}: who reaches it gets what it takes to read and write its memory", fix)


def _engine(client: Client, info: EngineInfo) -> Row:
    """Name the engine, and time a short question."""
    times = []
    for _ in range(_QUESTIONS):
        began = time.perf_counter()
        ask_engine(client)
        times.append(time.perf_counter() - began)
    stages, ranks = (len({rank[place] for rank in info.ranks}) for place in (0, 1))
    sizes = f"tp={ranks}" + (f",pp={stages}" if stages > 1 else "")
    state = f"{info.engine_id}, started as {info.incarnation_id.hex()}, {sizes}; a question and its answer take "
    return Row("peer: engine", "ok", f"{state}{duration(statistics.median(times))}")


def _advertised(asked: tuple[str, int], info: EngineInfo, access: Access) -> Iterator[Row]:
    """Connect to the address that the engine advertises, because from this host it may lead to another engine.

    Skipped if the command already asked that address.
    """
    from kvhma.vllm.wire.params import Address

    if info.advertised is None or info.advertised == asked:
        return
    name, advertised = "peer: advertised address", Address(*info.advertised)
    found = f"{info.engine_id} sends decode engines to {advertised}"
    fix = "advertised_host and advertised_port of that engine: where this host reaches it"
    try:
        with connect(look_up(info.advertised, access), access) as client:
            reached = ask_engine(client)
    except HandshakeError as error:
        yield Row(name, "failed", f"{found}: {error}", fix)
        return
    if reached.incarnation_id != info.incarnation_id:
        yield Row(name, "failed", f"{found}, which leads from here to engine {reached.engine_id}", fix)
    else:
        yield Row(name, "ok", f"{found}, which leads there from here too")


def _handshake(workers: Sequence[LiveWorker], took: str) -> Row:
    nbytes = sum(len(worker.data) for worker in workers)
    versions = sorted({f"kvhma {worker.extra.kvhma}, vLLM {worker.extra.vllm}" for worker in workers})
    signed = f"{len(workers)} signed {'worker identity' if len(workers) == 1 else 'worker identities'} ({size(nbytes)})"
    return Row("peer: handshake", "ok", f"{'; '.join(versions)}; {signed}, {took}")


def _models(workers: Sequence[LiveWorker]) -> Iterator[Row]:
    """Name each model that the workers report. A valid engine has one."""
    names = list(dict.fromkeys(_model(worker.extra.model) for worker in workers))
    for name in names:
        if len(names) == 1:
            yield Row("peer: model", "ok", name)
        else:
            yield Row("peer: model", "failed", name, "start all its workers with one model")


def _model(model: ModelIdentity) -> str:
    parts = [model.model, *([f"revision {model.revision}"] if model.revision else [])]
    parts += [f"model_id {model.model_id}"] if model.model_id else []
    parts += [f"dtype {model.dtype}", f"KV cache {model.cache_dtype}"]
    parts += [f"quantization {model.quantization}"] if model.quantization else []
    return ", ".join(parts)


def _geometries(workers: Sequence[LiveWorker]) -> Row:
    geometry = workers[0].payload.geometry
    kinds = ", ".join(f"{group.kind} {group.block_size}" for group in geometry.groups)
    nbytes = sum(region.bytes for region in geometry.regions)
    where = "/".join(sorted({region.memory for region in geometry.regions}))
    found = (
        f"{plural(len(geometry.layers), 'layer')} in {plural(len(geometry.groups), 'group')} (kind, block: {kinds}), "
        f"{size(nbytes)} of {where} a worker; `kvhma export` writes it"
    )
    return Row("peer: geometry", "ok", found)


def _copies(workers: Sequence[LiveWorker], access: Access) -> Iterator[Row]:
    """Say whether an engine of this host with the same secret would copy, if the engine offers its memory."""
    from kvhma.vllm.config.rooms import find_rooms

    if not all("copies" in worker.extra.options for worker in workers):
        return
    found = "its caches cannot be mapped without the option 'copies'"
    try:
        for room in find_rooms("worker", ["copies"]):
            for worker in workers:
                room.check_identity(worker.payload.geometry, worker.extra, authenticated=access.secrets.enabled)
            yield Row("peer: copies", "ok", 'its caches can be mapped: engines here with "copy" in their backends copy')
            return
    except (KvhmaError, ImportError) as error:
        found = str(error)
    yield Row("peer: copies", "note", f"engines here read it through NIXL: {found}")


# --- a read ----------------------------------------------------------------------------------------------------------


def _read(worker: LiveWorker, numeric: Address, access: Access) -> Row:
    """Read null blocks, which hold no request's tokens, in a separate process: the transport may end the process."""
    from kvhma.vllm.config.net_devices import ENVIRONMENT, is_loopback

    name, fix = (
        "peer: read",
        "NIXL_LOG_LEVEL=DEBUG and UCX_LOG_LEVEL=info say more; see also kvhma's page on NICs",
    )
    rows = null_rows(worker.payload.geometry)
    if not len(rows):
        return Row(
            name, "note", "the engine has no null block; other blocks may belong to requests, so nothing is read"
        )
    devices = access.settings.net_devices
    if devices is None and is_loopback(numeric.host):
        devices = os.environ.get(ENVIRONMENT, "lo")
    timeout = access.settings.handshake_timeout
    try:
        secret = access.secrets.enabled
        with process(_measure, worker.data, rows, devices, timeout, secret) as pipe:
            connected, best = receive(pipe, "reading", 4 * timeout + 60)
    except KvhmaError as error:
        return Row(name, "failed", str(error), fix)
    nbytes = int(rows[:, 1].sum())
    return Row(
        name,
        "ok",
        f"{plural(len(rows), 'run')} of the null block, {size(nbytes)}, in {duration(best)} (the best of {_READS}), "
        f"{size(nbytes / best)}/s; connected in {duration(connected)}",
    )


def null_rows(geometry: Geometry) -> NDArray[np.uint64]:
    """Return address, length and device of a run of each part in each layer's null block, without repeats.

    Other blocks may be between the items of a page, so only adjacent bytes are a run::

        region.base + offset + null_block * block_stride
        |..... part ............................|
        | item item item item | other block | item item ...
        |<------- run ------->|
    """
    found = dict[int, tuple[int, int, int]]()
    if geometry.null_block is not None:
        for layer in geometry.layers:
            region = geometry.regions[layer.region]
            start = region.base + layer.offset + geometry.null_block * layer.block_stride
            for part in layer.page.parts:
                length = min(_run(part), _MAX_ROW_BYTES)
                if length and region.memory == geometry.regions[0].memory:
                    found.setdefault(start + part.offset, (start + part.offset, length, region.device))
    return np.array(list(found.values())[:_MAX_ROWS], dtype=np.uint64).reshape(-1, 3)


def _run(part: Part) -> int:
    """Return the length in bytes, from a part's first item on, of the run of all its items."""
    run = part.item_bytes
    for axis in sorted(part.axes, key=lambda axis: axis.stride):
        if axis.stride != run:
            break
        run *= axis.length or 0
    return run


def _measure(
    pipe: Connection, data: bytes, rows: NDArray[np.uint64], devices: str | None, timeout: float, secret: bool
) -> None:
    """Connect, check whose memory it is, read and disconnect; send the seconds of connecting and reading.

    It checks as a decode engine does, with or without a secret.
    """
    if devices is not None:
        os.environ["UCX_NET_DEVICES"] = devices
    from kvhma.nixl import Agent
    from kvhma.vllm.peers.board_reader import BoardMemory

    lengths = rows[:, 1]
    memory = np.zeros(int(lengths.sum()), np.uint8)
    local = rows.copy()
    local[:, 0] = memory.ctypes.data + np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.uint64)
    local[:, 2] = 0
    with Agent(f"kvhma-doctor-{secrets.token_hex(8)}") as agent:
        agent.register(bytes_geometry(memory))
        began = time.perf_counter()
        peer = agent.connect(data, timeout=timeout, warm_up=False)
        board = BoardMemory(agent).checked_reader(peer, timeout, with_secret=secret)
        agent.warm_up(peer, timeout)
        connected = time.perf_counter() - began
        times = []
        for _ in range(_READS):
            began = time.perf_counter()
            kind = peer.geometry.regions[0].memory
            if not agent.read(peer, local, rows, remote_memory=kind).wait(timeout):
                raise HandshakeTimeoutError(f"a read of {lengths.sum()} bytes did not end in {timeout} s")
            times.append(time.perf_counter() - began)
        if board is not None:
            board.close()
        agent.disconnect(peer, timeout)
    pipe.send((connected, min(times)))
