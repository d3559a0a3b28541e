# SPDX-License-Identifier: Apache-2.0
"""Spans of loads: under the request's trace, one after the other, and made by no thread that loads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry, which vLLM brings")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvhma.vllm.failures import Failure
from kvhma.vllm.metadata import StepMetadata
from kvhma.vllm.options.spans import worker as spans
from kvhma.vllm.options.spans.scheduler import Trace, traceparent_of
from kvhma.vllm.options.spans.worker import LoadTimes, Room
from kvhma.vllm.scheduler import KvhmaScheduler
from support.counted import Counted
from support.schedulers import end_read, finished_at, load, request, scheduler, tables
from support.waiting import HANG_SECONDS, until
from support.workers import PAGE, PAGES, Decode, Prefill
from support.workers import load as command

TRACE, CLIENT = "0123456789abcdef0123456789abcdef", "fedcba9876543210"
PARENT = f"00-{TRACE}-{CLIENT}-01"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans, "_tracer", lambda: provider.get_tracer("kvhma"))
    return exporter


@pytest.fixture
def engines() -> Iterator[tuple[KvhmaScheduler, KvhmaScheduler]]:
    with contextlib.closing(scheduler()) as p, contextlib.closing(scheduler()) as d:
        yield p, d


@pytest.fixture
def workers() -> Iterator[tuple[Prefill, Decode]]:
    with contextlib.closing(Prefill()) as p, contextlib.closing(Decode()) as d:
        yield p, d


def times(now: float, **more: Any) -> LoadTimes:
    """A load that was queued 10 s ago and started 5 s ago; each part took a second, posting half of one."""
    parts = {"planned_at": now - 4, "post_began": now - 3.5, "posted_at": now - 3, "read_at": now - 2, "ended_at": now}
    return LoadTimes(Trace(PARENT, 5.0), now - 5, **{**parts, **more})


def room(rank: int = 0, counted: Counted | None = None) -> Room:
    return Room(SimpleNamespace(rank=rank), None, SimpleNamespace(stats=counted or Counted()))  # type: ignore[arg-type]


def made(exported: InMemorySpanExporter, of: LoadTimes, rank: int = 0) -> dict[str, Any]:
    writer = room(rank)
    writer.queue_spans(of)
    writer.close(10)
    return {span.name: span for span in exported.get_finished_spans()}


def test_spans_are_under_the_clients(exported: InMemorySpanExporter) -> None:
    """Their times are those of the load on the wall clock, and each ends before the next one begins."""
    now, wall = time.monotonic(), time.time()
    found = made(exported, times(now, attributes={"kvhma.bytes": 7}))
    load = found.pop("kvhma.load")
    assert f"{load.context.trace_id:032x}" == TRACE
    assert f"{load.parent.span_id:016x}" == CLIENT
    assert dict(load.attributes) == {"kvhma.bytes": 7}
    assert load.status.status_code is StatusCode.UNSET
    assert list(found) == [f"kvhma.{name}" for name in ("claim", "plan", "post", "read", "check")]
    for span in found.values():
        assert (span.context.trace_id, span.parent.span_id) == (load.context.trace_id, load.context.span_id)
    bounds = [(span.start_time, span.end_time) for span in found.values()]
    seconds = [round((end - start) / 1e9, 2) for start, end in bounds]
    assert seconds == [5, 1, 0.5, 1, 2]
    assert all(one[1] <= next_[0] for one, next_ in pairwise(bounds))
    assert (load.start_time, load.end_time) == (bounds[0][0], bounds[-1][1])
    assert abs(load.end_time / 1e9 - wall) < 1


@pytest.mark.parametrize(
    ("reached", "names"),
    [
        ({"planned_at": 0, "post_began": 0, "posted_at": 0, "read_at": 0}, ["claim", "plan"]),
        ({"post_began": 0, "posted_at": 0, "read_at": 0}, ["claim", "plan"]),
        ({"read_at": 0}, ["claim", "plan", "post", "read"]),
        ({}, ["claim", "plan", "post", "read", "check"]),
    ],
    ids=["handshake", "room", "transfer", "lease"],
)
def test_a_load_that_fails_ends_where_it_failed(
    reached: dict[str, float], names: list[str], exported: InMemorySpanExporter
) -> None:
    now = time.monotonic()
    found = made(exported, times(now, error="PeerLostError", **reached))
    load = found.pop("kvhma.load")
    assert list(found) == [f"kvhma.{name}" for name in names]
    assert (load.status.status_code, load.status.description) == (StatusCode.ERROR, "PeerLostError")
    if "posted_at" not in reached or reached["posted_at"]:
        assert list(found.values())[-1].end_time == load.end_time


def test_who_loads_makes_no_span(exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow exporter makes no load wait, and the queue for it is bounded."""
    threads, go_on = [], threading.Event()

    def slow(*arguments: Any, **more: Any) -> None:
        threads.append(threading.current_thread().name)
        assert go_on.wait(HANG_SECONDS)

    monkeypatch.setattr(spans, "_make", slow)
    monkeypatch.setattr(spans, "_MAX_WAITING", 4)
    writer = room()
    for _ in range(100):
        writer.queue_spans(times(time.monotonic()))
    go_on.set()
    writer.close(10)
    assert set(threads) == {"kvhma-trace"}
    assert 4 <= len(threads) <= 6


def test_an_exporter_that_fails_ends_nothing(exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    make, calls = spans._make, []

    def once(*arguments: Any, **more: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("no")
        make(*arguments, **more)

    monkeypatch.setattr(spans, "_make", once)
    counted = Counted()
    writer = room(counted=counted)
    for _ in range(2):
        writer.queue_spans(times(time.monotonic()))
    writer.close(10)
    assert len(exported.get_finished_spans()) == 6
    assert counted.by_label("thread_restarts") == {"kvhma-trace": 1}


def test_without_opentelemetry_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Any:
        raise ImportError("no module")

    monkeypatch.setattr(spans, "_tracer", missing)
    writer = room()
    writer.queue_spans(times(time.monotonic()))
    writer.close(10)
    assert "no spans of loads" in caplog.text


@pytest.mark.parametrize(
    ("headers", "right"),
    [
        ({"traceparent": PARENT, "tracestate": "a=b"}, True),
        (None, False),
        ({}, False),
        ({"tracestate": "a=b"}, False),
        ({"traceparent": PARENT + "-more"}, False),
        ({"traceparent": PARENT.upper()}, False),
        ({"traceparent": "0" * 1_000_000}, False),
        ({"traceparent": f"{PARENT}\n"}, False),
        ({"traceparent": 7}, False),
    ],
)
def test_a_client_writes_the_header(headers: Any, right: bool) -> None:
    assert traceparent_of(SimpleNamespace(trace_headers=headers)) == (PARENT if right else None)


def test_workers_know_the_trace_of_a_request(engines: tuple[KvhmaScheduler, KvhmaScheduler]) -> None:
    """They also learn how long the scheduler had it; a second try has not waited. Without a header they get nothing."""
    p, d = engines
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    plain = request("plain", params=finished_at(p))
    d.on_request_added(plain)
    assert load(d, plain).extras == {}
    traced = request("traced", params=finished_at(p))
    traced.trace_headers = {"traceparent": parent, "tracestate": "x" * 10_000}
    d.on_request_added(traced)
    time.sleep(0.05)
    order = load(d, traced)
    assert order.extras["spans"].parent == parent
    assert 0.05 <= order.extras["spans"].waited < 5
    end_read(d, traced, Failure("transfer", "no", transient=True))
    assert load(d, traced).extras == {"spans": (parent, 0.0)}
    end_read(d, traced)
    d.on_request_finished(traced, tables(d))
    traced.trace_headers = None
    traced.kv_transfer_params = finished_at(p)
    d.on_request_added(traced)
    assert load(d, traced).extras == {}, "another request with its name"


def test_a_load_whose_request_is_traced_has_spans(
    workers: tuple[Prefill, Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its times in their order; a load that is not traced has no spans, and starts no thread for them."""
    (p, d), taken = workers, []
    monkeypatch.setattr(Room, "queue_spans", lambda self, times: taken.append(times))
    d.reads(p, plain=[1])
    assert not taken
    trace = Trace(PARENT, 0.25)
    for name, theirs, cause in (("good", 2, {}), ("bad", PAGES, {"bad": "request"})):
        traced = command(name, p.remote(name, [theirs]), [2]).with_extra("spans", trace)
        d.worker.start_loads(StepMetadata([traced]))
        assert d.ended(name) == cause
    until(lambda: len(taken) == 2, d.worker.take_stats)
    good, bad = taken
    order = [good.ordered_at, good.planned_at, good.post_began, good.posted_at, good.read_at, good.ended_at]
    assert order == sorted(order)
    assert good.trace == trace
    assert (good.error, good.attributes["kvhma.bytes"]) == ("", PAGE)
    assert good.attributes["gen_ai.request.id"] == "good"
    assert (bad.error, bad.planned_at, bad.read_at) == ("BlockIdError", 0.0, 0.0)
