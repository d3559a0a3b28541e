# SPDX-License-Identifier: Apache-2.0
"""Loads into device memory, from registering caches to the bytes, with vLLM's views, real NIXL, and no device.

The device is simulated (`support.simulated_device`): launched work is done later, and only in the order that streams
and events give. So a missing order shows in bytes, and every call is recorded with its thread. These tests do not show
that a device, its driver and UCX behave as documented: tests/gpu does that.
"""

import contextlib
import copy
import itertools
import threading
import time

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
)

from kvhma.errors import GeometryError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.nixl import agent as agent_module
from kvhma.tensors import indices
from kvhma.tensors.copying import copy_rows
from kvhma.tensors.storages import Storages
from kvhma.vllm import KvhmaConnector, connector
from kvhma.vllm.caches.formats import Writer
from kvhma.vllm.config import engine_config
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.device import accelerator, memory
from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.metadata import ReadCommand, StepMetadata
from kvhma.vllm.options.copies import worker as copies_room
from kvhma.vllm.options.staging import pool as pool_module
from kvhma.vllm.options.staging.slots import NAME, SlotRanges
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.reads import read_steps
from kvhma.vllm.reads.active_read import ReadState
from kvhma.vllm.reads.read_pump import ReadPump
from kvhma.vllm.wire.params import Address, LeaseKey, PrefillParams, random_id
from kvhma.vllm.wire.secrets import Secrets
from support.cache.engine import vllm_config_of
from support.counted import Counted
from support.engines.engine import free_port
from support.simulated_device import (
    DEVICE,
    Accelerators,
    Event,
    HostMapped,
    OnDevice,
    SimulatedDevice,
    Stream,
    on_device,
    plain,
)
from support.vllm_caches import allocated
from support.waiting import until

pytestmark = pytest.mark.usefixtures("exact_plans")

BLOCKS, BLOCK, LAYERS = 8, 16, ("a", "b")
TOKENS = 2 * BLOCK + 5
THEIRS, OURS = [3, 1, 6], [2, 7, 4]
DIGEST = b"d" * 16


@pytest.fixture
def device(monkeypatch):
    """The device, in place of torch's."""
    made = SimulatedDevice()
    for module in (accelerator, memory):
        monkeypatch.setattr(module, "torch", made)
    open_nixl = agent_module.open_nixl
    monkeypatch.setattr(agent_module, "open_nixl", lambda *of: HostMapped(open_nixl(*of), made))
    monkeypatch.setattr(connector, "writer_of", lambda config: lambda layer: Writer("FLASH_ATTN", "cuda", "9.0"))
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    yield made
    made.close()


class Engine:
    """A worker's part of the connector, over caches that report being on the device by default."""

    def __init__(self, name, *, data_parallel_size=1, place=on_device, buffer="cpu", block=BLOCK, **extra):
        spec = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
        self.raw, views, caches = allocated(spec, BLOCKS, LAYERS, "LBHNC")
        self.raw.random_(generator=torch.Generator().manual_seed(len(name)))
        self.received: set[str] = set()
        self.failed: set[str] = set()
        # As bits: some random floats are NaN, which equals nothing.
        self.caches = [view.view(torch.int16) for view in views.values()]
        config = copy.deepcopy(vllm_config_of(name, False, "kv_both"))
        extra |= {"model_id": "tiny", "handshake_timeout": 10}
        config.kv_transfer_config.kv_connector_extra_config |= extra
        config.kv_transfer_config.kv_buffer_device = buffer
        config.parallel_config.data_parallel_size = data_parallel_size
        self.connector = KvhmaConnector(config, KVConnectorRole.WORKER, caches)
        self.connector.register_kv_caches({of: place(view) for of, view in views.items()})

    def step(self, *loads, launch=lambda: None, idle=False):
        """Run a step as vLLM's runners do: start loads, run the forward pass, read short loads, collect results."""
        self.connector.bind_connector_metadata(StepMetadata(list(loads), idle=idle))
        launch()
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(set())
        self.connector.clear_connector_metadata()
        self.received |= results.finished_recving or set()
        self.failed |= results.failed_recving or set()
        return results

    def until_received(self, *names):
        """Step until loads have ended since the last call; return those that failed."""
        until(lambda: self.received == set(names), lambda: self.step(idle=True))
        failed, self.failed, self.received = self.failed, set(), set()
        return failed


class Prefill(Engine):
    """An engine that peers read from."""

    def __init__(self, **more):
        super().__init__("prefill", **more)
        self.address = Address("127.0.0.1", free_port())
        self.instance = random_id()
        self.leases = LeaseTable(30.0)
        hello = self.connector.get_handshake_metadata()
        self.listener = Listener(
            self.address,
            LocalEngine("p", self.instance, {(0, 0): (hello.data, hello.private_key)}),
            leases=self.leases,
            secrets=Secrets.load(Settings()),
            counters=Counted(),
        )

    def load(self, name, blocks=OURS, theirs=THEIRS, tokens=TOKENS):
        key = LeaseKey(name, random_id())
        self.leases.hold(key, DIGEST, theirs)
        remote = PrefillParams(
            address=self.address,
            engine_id="p",
            incarnation_id=self.instance,
            lease_key=key,
            lease=30.0,
            num_tokens=tokens,
            prompt="0" * 32,
            spans=(Span(0, theirs),),
            tp_size=1,
            digest=DIGEST,
        )
        return ReadCommand(name, remote, random_id(), tokens, 0, (Span(0, blocks),), None)


@pytest.fixture
def start(device):
    """Start engines, and close them at the end."""
    with contextlib.ExitStack() as stack:

        def one(kind, *of, **more):
            made = kind(*of, **more)
            stack.callback(made.connector.shutdown)
            if isinstance(made, Prefill):
                stack.callback(made.listener.close)
            return made

        yield one


@pytest.fixture
def p(start):
    return start(Prefill)


@pytest.fixture
def d(start):
    return start(Engine, "d")


def expected_after_loading(p, before, tokens):
    """D's caches after a load: tokens of P, then zeros in the blocks of the load, everything else unchanged."""
    caches = [cache.clone() for cache in before]
    for of_d, of_p in zip(caches, p.caches, strict=True):
        of_d[OURS] = of_p[THEIRS]
        of_d[OURS[-1], :, tokens - 2 * BLOCK :] = 0
    return caches


def waits_for_device(d):
    return [read for read in d.connector._worker._pump._reads if read.state is ReadState.ZEROING]


def equal(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("tokens", [TOKENS, 3 * BLOCK])
def test_a_load_comes_after_the_steps_before_it_and_not_after_its_own(p, d, device, tokens):
    """D's blocks are still written by a step that was launched before they were freed (for example a draft's)."""
    before = [cache.clone() for cache in d.caches]
    written, ended = threading.Event(), threading.Event()

    def write_late():
        for cache in d.caches:
            cache[OURS] = 7

    device.engine.put(write_late, written.is_set)
    results = d.step(p.load("r", tokens=tokens), launch=lambda: device.engine.put(lambda: None, ended.is_set))
    assert not results.finished_recving
    until(lambda: waits_for_device(d))
    time.sleep(0.2)
    assert "nixl.initialize_xfer" not in [call.what for call in device.calls if call.thread == "kvhma-reads"]
    assert equal(d.caches, before), "nothing is zeroed before it may be"
    written.set()
    assert d.until_received("r") == set()
    assert not ended.is_set(), "the step that ordered it still runs"
    assert equal(d.caches, expected_after_loading(p, before, tokens))
    ended.set()
    device.idle()
    assert equal(d.caches, expected_after_loading(p, before, tokens)), "nothing is written later"
    stats = d.connector.get_kv_connector_stats().data
    assert (stats["delayed_posts"], len(stats["zero_seconds"])) == (1, 1)
    assert stats["zero_seconds"][0] > 0.1


def test_every_thread_chooses_the_device_first_and_none_waits_for_all_of_it(p, start, device):
    d = start(Engine, "d", prefill_engines=[str(p.address)])
    time.sleep(0.2)
    assert "kvhma-handshake" not in {call.thread for call in device.calls}, "graphs are captured first"
    d.connector.get_handshake_metadata()
    until(lambda: any(call.thread == "kvhma-handshake" and call.what == "nixl.transfer" for call in device.calls))
    d.step(p.load("r"))
    assert d.until_received("r") == set()
    time.sleep(1.2)  # notifications are drained once a second
    by_thread = {}
    for call in list(device.calls):
        by_thread.setdefault(call.thread, []).append(call)
    engine = by_thread.pop(threading.current_thread().name)
    assert by_thread.keys() == {
        "kvhma-reads",
        "kvhma-handshake",
        "kvhma-notifications",
    }
    for name, calls in by_thread.items():
        assert [call.what for call in calls[:2]] == ["choose", "first operation"], name
        assert calls[0].of == DEVICE, name
    assert {call.what for call in engine} & {"choose", "first operation"} == set(), "it is vLLM's to choose there"
    waits = {call.what for call in device.calls} & {"synchronize", "wait for an event"}
    assert waits == set()


def test_a_connection_is_warmed_up_from_device_memory_into_device_memory(p, d, device):
    d.step(p.load("r"))
    assert d.until_received("r") == set()
    made = [call.of for call in device.calls if (call.thread, call.what) == ("kvhma-handshake", "nixl.get_xfer_descs")]
    local, remote = [rows for memory, rows in made if memory == "VRAM"][-2:]  # P's lease board is in host memory
    ours, theirs = d.raw.data_ptr(), p.raw.data_ptr()
    assert not ours <= local[0, 0] < ours + d.raw.nbytes, "no block is written, the null block neither"
    assert theirs <= remote[0, 0] < theirs + p.raw.nbytes
    assert local[0, 1] == remote[0, 1] <= 1 << 16


def test_a_load_that_the_device_holds_up_holds_up_no_other(p, d, device):
    go_on = threading.Event()
    device.engine.put(lambda: None, go_on.is_set)
    d.step(p.load("waits"))
    until(lambda: waits_for_device(d))
    d.step(p.load("wrong", blocks=[BLOCKS, 1, 2]))
    assert d.until_received("wrong") == {"wrong"}
    go_on.set()
    assert d.until_received("waits") == set()


@pytest.mark.parametrize("where", ["in the load", "in the thread"])
def test_a_load_that_failed_is_not_reported_while_the_device_may_write(p, d, device, monkeypatch, where):
    """vLLM gives its blocks to another request at once, and launched work would zero them."""
    d.step(p.load("before"))
    d.until_received("before")
    go_on = threading.Event()
    device.engine.put(lambda: None, go_on.is_set)
    raised = []

    def raise_once(read, function, *args):
        if not raised and read.launched is not None:
            raised.append(read)
            raise RuntimeError("between the launch and the post")
        return function(*args)

    if where == "in the load":
        ended = read_steps._device_ended
        monkeypatch.setattr(read_steps, "_device_ended", lambda read: raise_once(read, ended, read))
    else:
        drive = ReadPump._drive

        def drives(pump, **more):
            drive(pump, **more)
            for read in pump._reads:
                raise_once(read, len, "")

        monkeypatch.setattr(ReadPump, "_drive", drives)
    d.step(p.load("r"))
    until(lambda: raised)
    time.sleep(0.2)
    assert d.step(idle=True).finished_recving == set()
    go_on.set()
    assert d.until_received("r") == ({"r"} if where == "in the load" else set()), "a thread that restarts fails no read"


def test_a_device_that_fails_fails_its_loads(p, d, device, monkeypatch):
    d.step(p.load("before"))
    d.until_received("before")
    monkeypatch.setattr(type(d.connector._worker._device.mark()), "query", lambda event: 1 // 0)
    d.step(p.load("r"))
    assert d.until_received("r") == {"r"}


@pytest.fixture
def copies(device, monkeypatch):
    """The device, which also orders copies by its streams, and finds copies that would wait for a stream."""
    monkeypatch.setattr(OnDevice, "simulated", device)
    for module in (pool_module, indices):
        monkeypatch.setattr(module, "torch", device)
    return device


def pool_over(cache, slots):
    """Slots for blocks of sixteen bytes."""
    part = Part("kv", "uint8", 1, 0, (Axis("tokens", 1, 16), Axis("content", 16, 1)))
    region = Region(cache.data_ptr(), cache.nbytes, "VRAM", 1)
    layer = Layer("a", 0, 0, 0, len(cache), 16, Page((part,)))
    return pool_module.StagingPool(Geometry((region,), (Group("full", 1),), (layer,)), {"a": cache}, slots)


def test_blocks_come_from_the_host_after_the_steps_before_and_no_thread_waits(copies):
    cache = on_device(torch.zeros(8, 16, dtype=torch.uint8))
    pool = pool_over(cache, SlotRanges.of(1, 4))
    pool._bytes.view(6, -1)[2:, :16] = torch.arange(4, dtype=torch.uint8)[:, None] + 1
    go_on = threading.Event()
    copies.engine.put(lambda: plain(cache).fill_(9), go_on.is_set)
    done = pool.copy_in([Span(0, [2, 3, 5])], [Span(0, [6, 1, 4])], pool.device.mark())
    time.sleep(0.1)
    assert not done.query()
    assert not plain(cache).any()
    go_on.set()
    until(done.query)
    assert plain(cache)[:, 0].tolist() == [9, 1 + 1, 9, 9, 4, 9, 1, 9]
    assert plain(cache)[:, 15].tolist() == plain(cache)[:, 0].tolist()
    asked = {call.what for call in copies.calls}
    assert asked & {"synchronize", "wait for an event"} == set()
    streams = {id(call.of) for call in copies.calls if call.what in ("copy_", "index_copy_")}
    assert streams == {id(pool.device._stream)}


def test_blocks_go_to_the_host_on_the_engines_stream_which_is_waited_for(copies):
    cache = on_device(torch.zeros(8, 16, dtype=torch.uint8))
    pool = pool_over(cache, SlotRanges.of(4, 1))
    pool._bytes.fill_(77)
    copies.engine.put(lambda: plain(cache).copy_(torch.arange(8, dtype=torch.uint8)[:, None].expand(8, 16)))
    pool.copy_out([Span(0, [6, 1, 4])], [Span(0, [1, 2, 4])])
    assert pool._bytes.view(6, -1)[:, 0].tolist() == [77, 6, 1, 77, 4, 77]
    assert {call.of for call in copies.calls if call.what == "index_select"} == {copies.engine}
    assert "synchronize" not in {call.what for call in copies.calls}


def test_few_blocks_are_copied_aside_at_a_time(copies, monkeypatch):
    monkeypatch.setattr(pool_module, "_ASIDE_BYTES", 200)  # slots are 64 bytes
    cache = on_device(torch.zeros(8, 16, dtype=torch.uint8))
    pool = pool_over(cache, SlotRanges.of(1, 7))
    pool._bytes.view(9, -1)[2:, :16] = torch.arange(7, dtype=torch.uint8)[:, None] + 1
    until(pool.copy_in([Span(0, range(2, 9))], [Span(0, [7, 6, 5, 4, 3, 2, 1])]).query)
    assert plain(cache)[:, 3].tolist() == [0, 7, 6, 5, 4, 3, 2, 1]
    assert [call.what for call in copies.calls].count("index_copy_") == 3


def test_what_was_launched_is_waited_for_if_the_rest_raises(copies, monkeypatch):
    cache = on_device(torch.zeros(8, 16, dtype=torch.uint8))
    pool = pool_over(cache, SlotRanges.of(1, 4))
    within = []
    monkeypatch.setattr(pool_module, "_within", lambda *of: within.append(of) or 1 // 0)
    go_on = threading.Event()
    copies.engine.put(lambda: None, go_on.is_set)
    after, raised = pool.device.mark(), []

    def copy_in():
        with pytest.raises(ZeroDivisionError):
            pool.copy_in([Span(0, [2])], [Span(0, [6])], after)
        raised.append(all(not stream.queue for stream in copies.streams))

    thread = threading.Thread(target=copy_in)
    thread.start()
    until(lambda: within)
    time.sleep(0.1)
    assert not raised
    go_on.set()
    thread.join(10)
    assert raised == [True]


def test_a_load_through_the_host_is_reported_when_its_blocks_are_there(copies, start, monkeypatch):
    """Other loads are reported meanwhile: no thread waits for the device."""
    monkeypatch.setattr(engine_config, "HOST", "host")
    p, d = start(Prefill, buffer="host"), start(Engine, "d", buffer="host")
    before = [cache.clone() for cache in d.caches]
    expected = expected_after_loading(p, before, TOKENS)
    slots = (Span(0, [2, 3, 1]),)
    p.connector.bind_connector_metadata(StepMetadata(extras={NAME: [((Span(0, THEIRS),), slots)]}))
    p.connector.wait_for_save()
    go_on = threading.Event()
    copies.engine.put(lambda: None, go_on.is_set)
    d.step(p.load("r", theirs=[2, 3, 1]))
    unknown = p.load("unknown", theirs=[2, 3, 1], blocks=[5, 1, 3])
    d.step(unknown._replace(remote=unknown.remote._replace(lease_key=LeaseKey("unknown", 1))))
    assert d.until_received("unknown") == {"unknown"}
    time.sleep(0.1)
    assert d.step(idle=True).finished_recving == set()
    assert equal(d.caches, before)
    go_on.set()
    assert d.until_received("r") == set()
    assert equal(d.caches, expected)
    assert "synchronize" not in {call.what for call in copies.calls}


def test_blocks_are_permuted_and_no_thread_waits(copies):
    cache = on_device(torch.arange(24, dtype=torch.uint8))
    region = Region(cache.data_ptr(), cache.nbytes, "VRAM", 1)
    part = Part("kv", "uint8", 1, 0, (Axis("tokens", 1, 24), Axis("content", 24, 1)))
    geometry = Geometry((region,), (Group("full", 1),), (Layer("a", 0, 0, 0, 1, 24, Page((part,))),))
    held = memory.DeviceMemory(geometry, {"a": cache.view(1, 24)})
    copies.idle()
    # Two heads of three blocks: block by block as they were read, head by head as they belong.
    done = held.permute(np.array([[cache.data_ptr(), 1, 3, 2, 4]], np.uint64))
    until(done.query)
    expected = torch.arange(24, dtype=torch.uint8).view(3, 2, 4).transpose(0, 1).reshape(-1)
    assert torch.equal(plain(cache), expected)
    assert {call.what for call in copies.calls} & {"synchronize", "wait for an event"} == set()


def launch_on_host(own, source, local, remote):
    """The copy of the simulated device, whose memory is the host's."""
    own.contents = [plain(content).numpy() for content in own.contents]
    copy_rows(own, source, local, remote)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(
    ("place", "permuted", "copied"),
    [(on_device, 2, ""), (on_device, 0, "copy"), (on_device, 2, "no Triton"), (plain, 0, ""), (plain, 0, "copy")],
)
def test_a_device_permutes_shorter_blocks_of_p(start, place, permuted, copied, monkeypatch):
    """P has each head of a block of 8 tokens in one place; D's blocks have 16 tokens of a head in one.

    If D copies, rows are cheap, so nothing is permuted. On a device it needs Triton for that.
    """
    monkeypatch.setattr(copies_room, "find_spec", lambda name: None if copied == "no Triton" else name)
    monkeypatch.setenv("KVHMA_SECRET", "a secret of at least 16 bytes")
    monkeypatch.setattr(copies_room, "launch_copy", launch_on_host)
    map_offer = copies_room.map_offer  # the simulated device's memory is the host's
    monkeypatch.setattr(copies_room, "map_offer", lambda offer, memory: map_offer(offer, "DRAM"))
    extra = {"backends": ["copy", "UCX"]} if copied else {}
    p, d = start(Prefill, block=8, place=place, **extra), start(Engine, "d", place=place, **extra)
    expected, theirs = [cache.clone() for cache in d.caches], [3, 1, 6, 2, 5]
    for token in range(3 * BLOCK):
        for of_d, of_p in zip(expected, p.caches, strict=True):
            where = OURS[token // BLOCK], slice(None), token % BLOCK
            of_d[where] = of_p[theirs[token // 8], :, token % 8] if token < TOKENS else 0
    d.step(p.load("r", theirs=theirs))
    assert d.until_received("r") == set()
    assert equal(d.caches, expected)
    nbytes = permuted * sum(cache[0].nbytes for cache in d.caches)  # of D's whole blocks
    until(lambda: d.connector._worker._pump._reads == [])
    stats = d.connector.get_kv_connector_stats().data
    assert stats.get("permuted_bytes", 0) == nbytes
    assert stats.get("copied_bytes", 0) == (stats["bytes"][0] if copied == "copy" else 0)


def test_what_is_simulated_is_torchs():
    for simulated, real in ((Stream, torch.Stream), (Event, torch.Event), (Accelerators, torch.accelerator)):
        names = {name for name in vars(simulated) if not name.startswith("_") and name != "put"}
        assert names
        assert all(callable(getattr(real, name)) for name in names), real
    assert hasattr(torch.Stream, "__enter__")
    stream, event = torch.Stream(torch.device("cpu"), priority=-1), torch.Event(torch.device("cpu"))
    assert (stream.device, event.device) == (torch.device("cpu"), torch.device("cpu"))
    pieces = [torch.ones(3), torch.ones(2)]
    torch._foreach_zero_(pieces)
    assert not any(piece.any() for piece in pieces)


def test_caches_on_several_devices_are_refused():
    other = type("Other", (OnDevice,), {"device": torch.device("cuda", 2)})
    tensors = [on_device(torch.zeros(1)), torch.zeros(1).as_subclass(other)]
    with pytest.raises(GeometryError, match="on cuda:1 and on cuda:2"):
        accelerator.device_of(tensors)
    assert accelerator.device_of([torch.zeros(1)]).is_host
    assert accelerator.device_of(itertools.repeat(torch.zeros(1), 2)).is_host


def test_tensors_of_inference_mode_are_zeroed_outside_of_it(device):
    """vLLM may have made its caches in inference mode; writing them in another thread raises."""
    with torch.inference_mode():
        cache = on_device(torch.ones(64, dtype=torch.int8))
    found = []

    def launch():
        pieces = Storages({"a": cache}).pieces(rows)
        made = accelerator.Accelerator(DEVICE)
        found.append(made.launch(lambda: torch._foreach_zero_(pieces), None))

    rows = np.array([[cache.data_ptr() + 4, 8, 1]], np.uint64)
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert found
    assert cache.as_subclass(torch.Tensor).sum() == 56
