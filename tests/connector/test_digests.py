# SPDX-License-Identifier: Apache-2.0
"""Digests through the connector: schedulers, workers with real memory and NIXL, leases; no engine."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")
torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")

from kvhma.digests import ContentDigest, content_digest, differences
from kvhma.errors import DigestError, GeometryError, RequestError, SettingsError, UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Group, Page, Part, Region, Span
from kvhma.nixl import Agent, key_hash
from kvhma.oracle import fill_source
from kvhma.vllm.config.engine_facts import EngineFacts
from kvhma.vllm.config.rooms import WITHOUT_SETTING
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.device.memory import DeviceMemory
from kvhma.vllm.failures import Failure
from kvhma.vllm.holds import lease_table
from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.loads import decode
from kvhma.vllm.metadata import LocalWorkerIdentity, ReadCommand, StepMetadata, WorkerReport
from kvhma.vllm.options.digests import worker as digests_worker
from kvhma.vllm.options.digests.sums import NAME, RankSums, ReportedSums, StepDigests, read_digest, write_digest
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.reads import results
from kvhma.vllm.reads.active_read import ActiveRead
from kvhma.vllm.reads.results import LoadResults
from kvhma.vllm.scheduler import KvhmaScheduler
from kvhma.vllm.telemetry.stats import TransferStats
from kvhma.vllm.wire.params import Address, LeaseClaim, LeaseKey, PrefillParams
from kvhma.vllm.wire.proofs import new_agent_key
from kvhma.vllm.wire.secrets import Secrets
from kvhma.vllm.worker import KvhmaWorker
from support.boards import board_of
from support.engines.engine import free_port
from support.identity import IDENTITY
from support.pairs import heads, latent, rank, state
from support.params import text_of
from support.schedulers import STEP, manager, request
from support.waiting import until

TOKENS = 40


def nothing(num_tokens: int) -> ContentDigest:
    return ContentDigest(num_tokens, 1, {}, {})


NAMES = itertools.count()
GROUPS = [Group("full", 4), Group("sliding", 4, window=9), Group("mla", 4), Group("ssm", 1)]


def geometry(base: int, index: int, size: int) -> Geometry:
    layers = [("a", 0, heads(4, size, index)), ("b", 1, heads(4, size, index)), ("c", 2, latent(4, 6))]
    return rank(base, GROUPS, [*layers, ("d", 3, state(4, size, index))], blocks=64, tp=(index, size))


def options_of(settings: Settings) -> tuple[str, ...]:
    return (*WITHOUT_SETTING, *([NAME] if settings.content_digests else []))


class Rank:
    """A worker and its memory."""

    def __init__(self, settings: Settings, index: int, size: int) -> None:
        sketch = geometry(4096, index, size)
        end = sketch.regions[-1].base + sketch.regions[-1].bytes
        self.buffer = np.zeros(end, np.uint8)
        self.geometry = geometry(self.buffer.ctypes.data, index, size)
        self.memory = [self._of(region) for region in self.geometry.regions]
        self.private, public = new_agent_key()
        self.agent = Agent(f"digests{next(NAMES)}-{key_hash(public)}", public_key=public)
        self.agent.register(self.geometry)
        self.board, extra = board_of(self.agent, public)
        self.hello = LocalWorkerIdentity(self.agent.handshake_payload(self.geometry, extra), self.private)
        context = WorkerContext(
            settings,
            Secrets(),
            "d",
            IDENTITY,
            self.geometry,
            self.agent,
            rank=index,
            board=self.board,
            options=options_of(settings),
        )
        self.worker = KvhmaWorker(context, DeviceMemory(self.geometry, {"all": torch.from_numpy(self.buffer)}))
        self.worker.be_ready()

    def _of(self, region: Region) -> np.ndarray:
        start = region.base - self.buffer.ctypes.data
        return self.buffer[start : start + region.bytes]


class Engine:
    """A scheduler and its workers, driven step by step as vLLM does."""

    def __init__(self, ranks: int, **settings: Any) -> None:
        read = Settings.read({"handshake_timeout": 2, **settings})
        self.ranks = [Rank(read, index, ranks) for index in range(ranks)]
        facts = EngineFacts(
            engine_id=f"engine{next(NAMES)}",
            address=Address("127.0.0.1", free_port()),
            tp_size=ranks,
            pp_size=1,
            has_state=True,
            has_windows=True,
            backoff=1,
            recompute=True,
            host_staged=False,
            transfer_groups=(0, 1, 2, 3),
            options=options_of(read),
        )
        self.scheduler = KvhmaScheduler(read, Secrets(), facts)
        self.scheduler.context.manager = manager()
        self.scheduler.serve({(0, index): one.hello for index, one in enumerate(self.ranks)})
        self.ended: dict[str, bool] = {}
        self.failures: dict[str, Failure] = {}
        self._counts: dict[str, int] = {}
        self._failed: set[str] = set()

    def close(self) -> None:
        self.scheduler.close()
        for one in self.ranks:
            one.worker.close()

    def step(self) -> None:
        """One step: the workers get their orders, and the scheduler what all of them report."""
        metadata = self.scheduler.on_step(STEP)
        total: WorkerReport | None = None
        done = set()
        for one in self.ranks:
            one.worker.start_loads(metadata)
            received, report = one.worker.collect(idle=True)
            self.failures |= report.failures
            self._failed |= report.failures.keys()
            total = report if total is None else total.aggregate(report)
            for name in received:
                self._counts[name] = self._counts.get(name, 0) + 1
                if self._counts[name] == len(self.ranks):
                    del self._counts[name]
                    done.add(name)
        assert total is not None
        self.ended |= {name: name not in self._failed for name in done}
        self.report(None if total.is_empty else total, done, done & self._failed)
        self._failed -= done

    def report(self, report: WorkerReport | None, received: set[str], failed: set[str]) -> None:
        """Tell the scheduler what workers report."""
        self.scheduler.on_worker_results(
            SimpleNamespace(finished_recving=received, failed_recving=failed, kv_connector_worker_meta=report)
        )

    def steps(self, condition: Any, *others: Engine) -> None:
        def step() -> None:
            for engine in (self, *others):
                engine.step()

        until(condition, step)

    def stats(self) -> dict[str, Any]:
        total = TransferStats()
        for part in [self.scheduler, *(one.worker for one in self.ranks)]:
            total.aggregate(part.take_stats() or TransferStats())
        return total.data


def tables(start: int) -> list[list[int]]:
    counts = [10, 10, 10, 1]
    return [list(range(start + 10 * at, start + 10 * at + count)) for at, count in enumerate(counts)]


def asked(name: str, params: dict[str, Any]) -> SimpleNamespace:
    """A request of one token more than P computes."""
    found = request(name, TOKENS + 1, params)
    found.num_computed_tokens = TOKENS
    return found


def prefill(p: Engine, name: str = "at p", *, summed: bool = False) -> dict[str, Any]:
    """Let P's ranks hold a prompt, and have its scheduler hand it off, if wanted after it has the digest."""
    held = asked(name, {"do_remote_decode": True})
    p.scheduler.on_request_added(held)
    params = p.scheduler.on_request_finished(held, tables(1))
    assert params is not None
    remote = PrefillParams.from_params(params, Secrets(), num_prompt_tokens=TOKENS + 1)
    for one in p.ranks:
        fill_source(one.memory, one.geometry, remote.spans)
    if summed:
        p.steps(lambda: all(held.content for held in p.scheduler.context.leases._held.values()))
    return json.loads(json.dumps(params))


def begin(d: Engine, params: dict[str, Any], name: str = "r", *, again: bool = False) -> None:
    """Begin to load it at D."""
    wanted = asked(name, params)
    if not again:
        d.scheduler.on_request_added(wanted)
    external = until(lambda: d.scheduler.matched_tokens(wanted, 0)[0], d.step)
    assert external == TOKENS
    groups = [[SimpleNamespace(block_id=block, is_null=False, block_hash=None) for block in one] for one in tables(11)]
    d.scheduler.on_blocks_allocated(wanted, SimpleNamespace(blocks=tuple(groups)), external)


def loads(d: Engine, params: dict[str, Any], *others: Engine, name: str = "r", again: bool = False) -> bool:
    """Load it at D, while other engines take steps, too; return whether D has loaded it."""
    begin(d, params, name, again=again)
    d.steps(lambda: name in d.ended, *others)
    return d.ended.pop(name)


def all_released(p: Engine, *others: Engine) -> None:
    p.steps(lambda: len(p.scheduler.context.leases) == 0, *others)


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "LOAD_RETRIES", 0)


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make(ranks: int, **settings: Any) -> Engine:
        made.append(Engine(ranks, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_loads_are_compared_whatever_the_ranks(engines: Any, theirs: int, ours: int) -> None:
    p, d = engines(theirs, content_digests="all"), engines(ours, content_digests="all")
    assert loads(d, prefill(p), p)
    counted = d.stats()
    assert counted["content_digests"] == {"match": 1}
    assert counted["digest_tokens"] == TOKENS + 8
    assert len(counted["digest_seconds"]) == ours
    all_released(p, d)  # only now: the load has been compared


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("region", "block", "said"),
    [
        (0, 3, "full layers, tokens 0..39"),
        (1, 20, "sliding 9 layers, tokens 32..39"),
        (2, 24, "full layers, tokens 0..39"),
        (3, 31, "ssm layers"),
    ],
)
@pytest.mark.usefixtures("no_retries")
def test_a_spoiled_block_of_each_kind_fails_the_load(
    engines: Any, theirs: int, ours: int, region: int, block: int, said: str
) -> None:
    p, d = engines(theirs, content_digests="all"), engines(ours, content_digests="all")
    params = prefill(p, summed=True)
    spoil(p.ranks[0], region, block)
    assert not loads(d, params, p)
    failure = d.failures["r"]
    assert (failure.cause, failure.transient) == ("digest", True)
    assert failure.text == f"what was loaded is not what P holds: {said}"
    counted = d.stats()
    assert counted["content_digests"] == {"mismatch": 1}
    assert counted["failed_loads"] == {"digest": ours}


def spoil(of: Rank, region: int, block: int) -> None:
    """Flip a bit of the last byte of a block."""
    layer = of.geometry.layers[region]
    of.memory[region][(block + 1) * layer.block_stride - 1] ^= 1


def test_a_load_that_differed_is_read_again(engines: Any) -> None:
    p, d = engines(2, content_digests="all"), engines(2, content_digests="all")
    params = prefill(p, summed=True)
    spoil(p.ranks[0], 0, 3)
    assert not loads(d, params, p)
    spoil(p.ranks[0], 0, 3)  # and it is right again
    assert loads(d, params, p, again=True)
    assert d.stats()["content_digests"] == {"mismatch": 1, "match": 1}


@pytest.mark.parametrize(("of_p", "of_d"), [("off", "all"), ("all", "off"), (0, 0)])
def test_nothing_is_compared_where_one_side_does_not_want_it(engines: Any, of_p: Any, of_d: Any) -> None:
    p, d = engines(2, content_digests=of_p), engines(1, content_digests=of_d)
    params = prefill(p)
    assert ("content" in text_of(params)) is (of_p == "all")
    assert loads(d, params, p)
    assert not {"content_digests", "digest_tokens"} & d.stats().keys()
    all_released(p, d)


def test_a_share_of_the_requests(engines: Any) -> None:
    p = engines(1, content_digests=0.25)
    chosen = sum("content" in text_of(prefill(p, f"{number}")) for number in range(200))
    assert 20 < chosen < 90


@pytest.mark.usefixtures("no_retries")
def test_a_digest_may_be_later_than_one_reply(engines: Any) -> None:
    """P's steps may take seconds on a machine that is overloaded, and the sums come with its steps."""
    p = engines(1, content_digests="all", handshake_timeout=0.5)
    d = engines(1, content_digests="all", handshake_timeout=0.5)
    handed_off = prefill(p)
    late = threading.Timer(1.0, lambda: until(lambda: p.step() or not is_summing(p)))
    late.start()
    try:
        assert loads(d, handed_off), d.failures
    finally:
        late.join()


def is_summing(p: Engine) -> bool:
    return any(room.needs_step() for room in p.scheduler.context.rooms)


class SilentQuestion:
    """A question that P does not answer."""

    open = True

    def __init__(self, *_: object, **__: object) -> None: ...

    def poll(self) -> bool:
        return False

    def close(self) -> None: ...


@pytest.mark.usefixtures("no_retries")
def test_a_p_that_does_not_answer_does_not_prolong_the_wait(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """P may answer that it has no digest yet, and then keep the last question open for twice a timeout more."""
    monkeypatch.setattr(digests_worker, "LeaseQuestion", SilentQuestion)
    p, d = engines(1, content_digests="all"), engines(1, content_digests="all", handshake_timeout=0.5)
    assert not loads(d, prefill(p), p)
    assert "does not have it" in d.failures["r"].text


@pytest.mark.usefixtures("no_retries")
def test_a_digest_that_never_comes_fails_the_load(engines: Any) -> None:
    p = engines(1, content_digests="all")
    d = engines(1, content_digests="all", handshake_timeout=0.3)
    assert not loads(d, prefill(p))  # P takes no step
    assert d.failures["r"].cause == "digest"
    assert "has announced a digest of 'at p' and does not have it" in d.failures["r"].text


@pytest.mark.parametrize(
    ("content", "cause", "said"),
    [
        (b"garbage", "request", "digest: 7 bytes cannot be read"),
        (bytes(range(256)) * 9, "request", "digest: 2304 bytes cannot be read"),
        (write_digest(nothing(TOKENS - 1)), "request", "P's digest is of 39 tokens, expected 40"),
        (
            write_digest(nothing(TOKENS)),
            "unsupported",
            "content_digests: layers: D sums full layers, .* nothing",
        ),
    ],
)
def test_whatever_p_says_ends_one_load(engines: Any, content: bytes, cause: str, said: str) -> None:
    p, d = engines(1, content_digests="all"), engines(1, content_digests="all")
    params = prefill(p)
    (key,) = p.scheduler.context.leases._held
    p.scheduler.context.leases.note_content(key, content)
    assert not loads(d, params)
    assert d.failures["r"].cause == cause
    assert re.search(said, d.failures["r"].text)
    assert loads(d, prefill(p, "another"), p, name="next")


def test_digests_that_an_answer_has_no_room_for_come_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    leases = LeaseTable(30.0)
    claims = [LeaseClaim(LeaseKey(f"{number}", number), 1, b"d" * 16) for number in range(3)]
    for claim in claims:
        leases.hold(claim.key, claim.digest, [1])
        leases.note_content(claim.key, bytes(10))
    other = claims[0]._replace(digest=b"e" * 16)
    monkeypatch.setattr(lease_table, "MAX_CONTENTS_BYTES", 25)
    assert leases.contents([*claims, other]) == [bytes(10), bytes(10), None, None]
    assert leases.contents(claims[2:]) == [bytes(10)]
    leases.note_content(LeaseKey("gone", 1), b"")  # its lease has ended meanwhile


@pytest.mark.parametrize("fails_first", [True, False])
@pytest.mark.usefixtures("no_retries")
def test_one_rank_that_fails_keeps_no_other_waiting(engines: Any, fails_first: bool) -> None:
    p, d = engines(1, content_digests="all"), engines(2, content_digests="all")
    begin(d, prefill(p))
    worker, received, failure = d.ranks[0].worker, set(), Failure("transfer", "lost", transient=True)
    summed: list[str] = []

    def step() -> None:
        worker.start_loads(d.scheduler.on_step(STEP))
        ended, report = worker.collect(idle=True)
        received.update(ended)
        summed.extend(report.extras.get(NAME, ()))
        d.report(report, set(), set())
        p.step()

    if not fails_first:
        until(lambda: summed, step)
    d.report(WorkerReport({"r": failure}), set(), set())
    until(lambda: received, step)
    assert (received, summed) == ({"r"}, ["r"])


@pytest.mark.parametrize("verdict", [None, DigestError("other bytes")])
def test_a_load_that_was_summed_waits_for_its_verdict(engines: Any, verdict: DigestError | None) -> None:
    worker = engines(1, content_digests="all").ranks[0].worker
    (room,) = (room for room in worker._rooms if isinstance(room, digests_worker.Room))
    load: Any = SimpleNamespace(request_id="r")
    read = ActiveRead(load, 0.0, extras={NAME: RankSums(nothing(4))})
    waiting = room.judge(read)
    next(waiting)
    _, report = worker.collect(idle=False)
    assert report.extras == {NAME: {"r": RankSums(nothing(4))}}
    for judged in ({"unknown": verdict}, {"r": verdict}):
        next(waiting)
        room.on_step(StepMetadata(extras={NAME: StepDigests([], judged)}))
    with pytest.raises(DigestError, match="other bytes") if verdict else contextlib.nullcontext():
        assert list(waiting) == []


def test_a_step_does_not_wait_for_a_load_that_needs_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_NEXT_READ_SECONDS", 30.0)
    of_worker, load = LoadResults(), ReadCommand("r", None, 1, 1, 0, (), None)  # type: ignore[arg-type]
    of_worker.expect([load])
    of_worker.need_step("r")
    began = time.monotonic()
    of_worker.wait()
    assert time.monotonic() - began < 10
    of_worker.fail_load("r", Failure("transfer", "lost", transient=True))
    assert not of_worker._need_step, "the next load of this name is awaited"


def test_sums_of_ranks_that_cannot_be_added_end_the_load() -> None:
    """D does not wait for a rank that has already sent an unusable sum."""
    full = ("full", 0)
    one, other = (ContentDigest(tokens, 1, {(full, 0): (1, 2)}, {full: 0}) for tokens in (40, 39))
    joined = RankSums(one, prefill=one).joined(RankSums(other, prefill=one))
    assert joined.ranks == 2
    with pytest.raises(UnsupportedPairError, match="cannot be compared"):
        differences(one, joined.digest, 7)


def test_reports_of_ranks_are_joined() -> None:
    def report(value: int) -> WorkerReport:
        sums = nothing(4)
        of_ranks = {"r": RankSums(sums), LeaseKey("k", value % 2): RankSums(sums)}
        return pickle.loads(pickle.dumps(WorkerReport(extras={NAME: ReportedSums(of_ranks)})))

    joined = report(0).aggregate(report(1)).aggregate(report(2))
    counted = {key: sums.ranks for key, sums in joined.extras[NAME].items()}
    assert counted == {"r": 3, LeaseKey("k", 0): 2, LeaseKey("k", 1): 1}
    other = WorkerReport(extras={NAME: ReportedSums({"r": RankSums(nothing(5))})})
    assert joined.aggregate(other).extras[NAME]["r"].ranks == 4, "D waits for no rank whose sum cannot be added"


def test_the_settings() -> None:
    shares = {"off": 0.0, "all": 1.0, 0.01: 0.01, 1: 1.0}
    assert {given: Settings.read({"content_digests": given}).content_digests for given in shares} == shares
    for wrong in ("some", 1.5, -0.1, True, [1]):
        with pytest.raises(SettingsError, match="content_digests is"):
            Settings.read({"content_digests": wrong})


def test_caches_that_cannot_be_summed_are_refused_at_start() -> None:
    cache = torch.zeros(1 << 12, dtype=torch.uint8)
    axes = (Axis("groups", 2, 8, 0, 1, may_repeat=True), Axis("tokens", 4, 2), Axis("content", 2, 1))
    page = Page((Part("kv", "uint8", 1, 0, axes),))
    one = rank(cache.data_ptr(), [Group("full", 4)], [("a", 0, page)], blocks=4, tp=(0, 2))
    context: Any = SimpleNamespace(geometry=one, cp_tp_size=1, settings=Settings())
    with pytest.raises(GeometryError, match="may repeat"):
        digests_worker.Room(context, DeviceMemory(one, {"a": cache}), LoadResults())


def test_tensors_and_arrays_have_the_same_sums() -> None:
    one = geometry(1 << 30, 0, 1)
    rng = np.random.default_rng(0)
    memory = [rng.integers(0, 256, region.bytes, np.uint8) for region in one.regions]
    spans = [Span(0, ids) for ids in tables(1)]
    of_arrays = content_digest(one, lambda region, at: memory[region][at:], TOKENS, spans, 5)
    # Each region begins inside a storage.
    tensors = [torch.from_numpy(np.concatenate([np.zeros(64, np.uint8), region])) for region in memory]
    of_tensors = content_digest(one, lambda region, at: tensors[region][64 + at :], TOKENS, spans, 5)
    assert of_arrays == of_tensors


def test_the_form_that_is_sent() -> None:
    sums = {(("full", 0), heads): (7, (1 << 64) - 1) for heads in (0, -4, 1, 2)}
    whole = ContentDigest(40, 2, sums, {("full", 0): 8})
    data = write_digest(whole)
    assert read_digest(data) == whole
    others = [replace(whole, layers={**sums, (("full", 0), 3): (1,)}), replace(whole, layers={}, from_tokens={})]
    with pytest.raises(RequestError, match="does not fit the others"):
        read_digest(write_digest(others[0]))
    assert read_digest(write_digest(others[1])) == others[1]
    with pytest.raises(RequestError, match="does not fit the others"):
        read_digest(write_digest(replace(whole, layers={})))
    rng = random.Random(3)
    for size in range(len(data)):
        with pytest.raises(RequestError, match="digest"):
            read_digest(data[:size])
    for _ in range(2000):  # only typed errors, for any bytes
        spoiled = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        with contextlib.suppress(RequestError, UnsupportedPairError):
            differences(read_digest(bytes(spoiled)), whole, 7)
            differences(whole, read_digest(bytes(spoiled)), 7)
