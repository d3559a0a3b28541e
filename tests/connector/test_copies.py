# SPDX-License-Identifier: Apache-2.0
"""Copies instead of NIXL's reads: real connectors in two processes, what falls back, and who is not believed."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

import torch

from kvhma.cli.doctor_peer import look_at_peer
from kvhma.cli.live_engine import read_access
from kvhma.errors import GeometryError, HandshakeError, SettingsError
from kvhma.geometry import Geometry, Region
from kvhma.vllm import KvhmaConnector
from kvhma.vllm.config.identity import decode_extra, encode_extra
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.options.copies import offers
from kvhma.vllm.options.copies.offers import (
    NAME,
    Offer,
    SharedDevice,
    SharedFile,
    SharedStorage,
    map_offer,
    read_offer,
    share,
)
from kvhma.vllm.options.copies.worker import CopiedPart, map_caches
from support.connector_engine import Engine, SpawnedEngine
from support.identity import IDENTITY
from support.waiting import until

BACKENDS = {"backends": ["copy", "UCX"]}
LEASE = 2.0


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHMA_SECRET", "a secret of at least 16 bytes")


@contextlib.contextmanager
def engines(
    before: str = "", *, of_p: dict[str, Any] = BACKENDS, **settings: Any
) -> Iterator[tuple[SpawnedEngine, Engine]]:
    p = SpawnedEngine("p", before=before, **of_p, **settings)
    d = Engine("d", **BACKENDS, **settings)
    try:
        yield p, d
    finally:
        d.close()
        p.kill()


def assert_read(p: Any, d: Engine, name: str, *, copied: bool = True) -> None:
    """D reads a new request of P right, by a copy or through NIXL."""
    d.counted()
    assert d.load(name, p.hold(name, [3, 5, 4]), [1, 2, 3]) is None
    assert d.bytes([1, 2, 3]) == p.bytes([3, 5, 4])
    found = until(lambda: (counts := d.counted()).get("bytes") and counts)
    assert found.get("copied_bytes", 0) == (len(p.bytes([3, 5, 4])) if copied else 0)
    assert found["posted_descriptors"] == ([1] if copied else found["selected_descriptors"])


def mapped(inode: int) -> bool:
    """Whether this process has a file mapped that has no name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.split()[4] == str(inode) and "(deleted)" in line for line in lines)


def test_rows_are_copied(secret: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vllm.kvhma"), engines() as (p, d):
        for number in range(3):
            assert_read(p, d, f"r{number}")
            p.wake()  # other bytes
    assert caplog.text.count("are copies: its caches are mapped here") == 1


def test_a_killed_p_is_noticed_although_its_memory_is_mapped(secret: None) -> None:
    with engines(kv_lease_duration=LEASE) as (p, d):
        assert_read(p, d, "before")
        remote, inode = p.hold("held", [3, 5, 4]), p.inode()
        assert mapped(inode)
        p.kill()
        killed = time.monotonic()
        assert d.load("after", remote, [4, 5, 6]) == "peer_lost"
        until(lambda: not mapped(inode))
        assert time.monotonic() - killed < 2 * LEASE


def test_memory_that_is_not_read_is_unmapped_and_mapped_again(secret: None) -> None:
    with engines(kv_lease_duration=LEASE) as (p, d):
        assert_read(p, d, "before")
        inode = p.inode()
        until(lambda: not mapped(inode))
        assert_read(p, d, "after")
        assert mapped(inode)


def test_p_sleeps_and_wakes_up(secret: None) -> None:
    with engines(kv_lease_duration=LEASE) as (p, d):
        assert_read(p, d, "before")
        old = p.hold("held", [3, 5, 4])
        p.sleep()
        assert d.load("asleep", old, [4, 5, 6]) in ("transfer", "peer_lost")
        p.wake()
        assert d.load("awake", old, [4, 5, 6]) == "handshake"
        assert_read(p, d, "after")


def test_p_closes_its_memory_although_d_has_it_mapped(secret: None) -> None:
    """P's file ends with its cache. The mapping of a D keeps the pages until it ends; that of a dead D has ended."""
    cache = torch.zeros(1 << 20, dtype=torch.uint8)
    offer = share([cache])
    extents = map_offer(offer, "DRAM")
    cache[5] = 7
    assert extents.contents[0][5] == 7
    (storage,) = offer.storages
    assert isinstance(storage.place, SharedFile)
    del cache
    with pytest.raises(OSError, match=r"fstat|Bad file"):
        os.fstat(storage.place.descriptor)


UNSHARED = {
    "expandable_segments": (
        "import torch\n"
        "def fail(storage): raise RuntimeError('expandable segments cannot be shared')\n"
        "torch.UntypedStorage._share_fd_cpu_ = fail",
        "expandable segments cannot be shared",
    ),
    "small /dev/shm": (
        "import kvhma.vllm.options.copies.offers as offers\n"
        "class Small: free = 12288\n"
        "offers.shutil.disk_usage = lambda path: Small",
        "/dev/shm has 12288 bytes free",
    ),
}


@pytest.mark.parametrize("why", UNSHARED)
def test_what_cannot_be_shared_is_read_through_nixl(
    secret: None, why: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before, text = UNSHARED[why]
    with caplog.at_level("INFO", "vllm.kvhma"), engines(before) as (p, d):
        assert_read(p, d, "first", copied=False)
        assert_read(p, d, "second", copied=False)
    assert capfd.readouterr().err.count(text) == 1
    assert caplog.text.count("go through NIXL: it offers no memory") == 1


@pytest.mark.parametrize("of_p", [BACKENDS, {}], ids=["copy", "UCX"])
def test_without_a_secret_nothing_is_mapped(of_p: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vllm.kvhma"), engines(of_p=of_p) as (p, d):
        assert_read(p, d, "r", copied=False)
    assert "no peer of this host can copy from the caches: peers need a secret" in caplog.text
    assert "go through NIXL: it offers no memory" in caplog.text


def test_a_d_without_the_setting_maps_nothing(secret: None) -> None:
    p = SpawnedEngine("p", **BACKENDS)
    with contextlib.closing(Engine("d")) as d:
        assert_read(p, d, "r", copied=False)
    p.kill()


FileOf = Callable[..., SharedFile]


@pytest.fixture
def file_of() -> Iterator[FileOf]:
    """Shared memory of this process that an honest peer could offer, but for what is changed."""
    kept: list[torch.Tensor] = []

    def made(**changed: Any) -> SharedFile:
        kept.append(torch.zeros(4096, dtype=torch.uint8))
        (storage,) = share(kept[-1:]).storages
        return msgspec.structs.replace(storage.place, **changed)

    yield made
    kept.clear()


def offer_of(place: Any, **changed: Any) -> Offer:
    return Offer(**{"host": offers.this_host(), "storages": [SharedStorage(4096, 4096, place)], **changed})


@pytest.mark.parametrize("changed", [{"inode": 12345}, {"device": 1}, {"descriptor": 1 << 40}, {"pid": 1 << 60}])
def test_only_the_memory_that_the_peer_means_is_mapped(changed: dict[str, int], file_of: FileOf) -> None:
    with pytest.raises((HandshakeError, OSError)):
        map_offer(offer_of(file_of(**changed)), "DRAM")
    assert map_offer(offer_of(file_of()), "DRAM").has(4096, 4096)


@pytest.mark.parametrize("kind", ["file", "pipe", "socket"])
def test_only_nameless_memory_is_mapped(kind: str, tmp_path: Path) -> None:
    if kind == "file":
        (tmp_path / "found").write_bytes(b"x" * 4096)
    if kind == "pipe":
        os.mkfifo(tmp_path / "found")
    with contextlib.ExitStack() as opened:
        if kind == "socket":
            descriptor = opened.enter_context(socket.socket()).fileno()
        else:
            descriptor = os.open(tmp_path / "found", os.O_RDWR | os.O_NONBLOCK)
            opened.callback(os.close, descriptor)
        found = os.fstat(descriptor)
        with pytest.raises((HandshakeError, OSError)):
            map_offer(offer_of(SharedFile(os.getpid(), descriptor, found.st_dev, found.st_ino)), "DRAM")


def test_memory_of_another_user_is_not_mapped(monkeypatch: pytest.MonkeyPatch, file_of: FileOf) -> None:
    place = file_of()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(HandshakeError, match="is not shared memory of that peer"):
        map_offer(offer_of(place), "DRAM")


def test_offers_that_lie_are_refused(file_of: FileOf) -> None:
    with pytest.raises(HandshakeError, match="on another host"):
        map_offer(offer_of(file_of(), host="another"), "DRAM")
    with pytest.raises(HandshakeError, match="shared memory of 4096 bytes, the peer names 8192"):
        map_offer(Offer(offers.this_host(), [SharedStorage(4096, 8192, file_of())]), "DRAM")
    device = SharedDevice("no such device", b"h", 0)
    with pytest.raises(HandshakeError, match="no such device is not visible here"):
        map_offer(offer_of(device), "VRAM")
    with pytest.raises(HandshakeError, match="its caches are in VRAM, what it offers is not"):
        map_offer(offer_of(file_of()), "VRAM")


GOOD = msgspec.json.encode(
    Offer("h", [SharedStorage(4096, 10, SharedFile(1, 2, 3, 4)), SharedStorage(8192, 10, SharedFile(1, 2, 3, 4))])
)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        GOOD.replace(b'"file"', b'"pickle"'),
        GOOD.replace(b'"pid":1', b'"pid":-1'),
        GOOD.replace(b'"pid":1', b'"pid":"1"'),
        GOOD.replace(b'"pid":1', b'"pid":9223372036854775808'),
        GOOD.replace(b'"host":"h"', b'"host":"' + b"h" * 200 + b'"'),
        GOOD.replace(b'"address":8192', b'"address":4105'),
        msgspec.json.encode(Offer("h", [SharedStorage(1, 1, SharedDevice("u", b"", 0))])),
        msgspec.json.encode(Offer("h", [SharedStorage(n, 0, SharedFile(1, 2, 3, 4)) for n in range(2000)])),
    ],
)
def test_offers_are_bounded_and_typed(data: bytes) -> None:
    assert len(read_offer(GOOD).storages) == 2
    assert data != GOOD
    with pytest.raises(HandshakeError):
        read_offer(data)


FORGED = """
import kvhma.vllm.options.copies.worker as worker
import torch
from msgspec.structs import replace
real, kept = worker.share, []
def share(caches):
    offer = real(caches)
    return replace(offer, storages=[replace(one, place=forged(one)) for one in offer.storages])
def other_memory(one):
    kept.append(torch.ones(one.nbytes, dtype=torch.uint8))
    return real(kept[-1:]).storages[0].place
worker.share = share
"""


def test_an_offer_that_cannot_be_mapped_costs_nothing(secret: None) -> None:
    """D reads such a peer through NIXL, and right."""
    with engines(f"{FORGED}\nforged = lambda one: replace(one.place, inode=1)") as (p, d):
        assert_read(p, d, "r", copied=False)


def test_memory_that_is_not_p_s_cache_is_found(secret: None) -> None:
    """The read that follows a copy finds other bytes. D then reads through NIXL."""
    with engines(f"{FORGED}\nforged = other_memory") as (p, d):
        assert d.load("first", p.hold("first", [3, 5, 4]), [1, 2, 3]) is None
        assert d.bytes([1, 2, 3]) == p.bytes([3, 5, 4])
        until(lambda: "bytes" in d.counted())
        assert_read(p, d, "second", copied=False)


def test_an_error_of_the_system_is_a_reason_to_read_through_nixl(secret: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("mmap length is greater than file size")

    monkeypatch.setattr(offers.mmap, "mmap", fail)
    with engines() as (p, d):
        assert_read(p, d, "r", copied=False)


def test_only_who_is_read_moves_its_caches(secret: None) -> None:
    for role, shared in (("kv_consumer", False), ("kv_producer", True)):
        with contextlib.closing(Engine("d", **BACKENDS, role=role)) as engine:
            assert engine.cache.is_shared() == shared


@pytest.mark.parametrize(("host", "state"), [("", "ok"), ("another", "note")])
def test_the_doctor_says_whether_copies_are_possible(
    secret: None, host: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = SpawnedEngine("p", **BACKENDS)
    if host:
        monkeypatch.setattr(offers, "this_host", lambda: host)
    rows = {row.name: row for row in look_at_peer(p.at(), read_access(None, None), read=False)}
    p.kill()
    assert rows["peer: copies"].state == state, rows
    assert ("on another host" in rows["peer: copies"].found) == bool(host)


def test_caches_that_are_not_all_offered_are_not_mapped(file_of: FileOf) -> None:
    place = file_of()
    extra = decode_extra(encode_extra(IDENTITY, vllm="0", options={NAME: offer_of(place)}))
    for base, nbytes, offered in ((4096, 4096, True), (4096, 4097, False), (4095, 2, False), (1 << 20, 1, False)):
        geometry = Geometry((Region(base, nbytes),), (), ())
        with contextlib.nullcontext() if offered else pytest.raises(HandshakeError, match="does not offer"):
            map_caches(geometry, extra, authenticated=True)


def test_storages_that_overlap_are_not_shared() -> None:
    """Each would become separate memory."""
    whole = torch.zeros(8192, dtype=torch.uint8)
    for part in (whole.numpy()[100:200], whole.numpy()[:100], whole.numpy()):
        with pytest.raises(GeometryError, match="two storages of the caches overlap"):
            share([whole, torch.from_numpy(part)])
    assert not whole.is_shared()
    assert len(share([whole, whole[5:], torch.empty(0)]).storages) == 1


def test_copy_alone_is_no_transport() -> None:
    with pytest.raises(SettingsError, match=r"backends is \['copy'\], expected a list of names with a transport"):
        Settings.read({"backends": ["copy"]})
    assert Settings.read(BACKENDS).nixl_backends == ("UCX",)


def test_sleep_mode_is_for_copies_too() -> None:
    class Config:
        kv_connector_extra_config = BACKENDS

    assert KvhmaConnector.supports_sleep_mode(Config)


def test_an_error_of_the_device_ends_the_copy() -> None:
    """Nothing runs on it any more, so the read may be reported."""

    class Event:
        def query(self) -> bool:
            raise RuntimeError("the device has failed")

    copy = CopiedPart(Event(), None, lambda: pytest.fail("read"), lambda: False)
    assert not copy.finished
    with pytest.raises(RuntimeError, match="the device has failed"):
        copy.poll()
    assert copy.finished
