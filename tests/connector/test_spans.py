# SPDX-License-Identifier: Apache-2.0
"""Spans of loads: under the request's trace, one after the other, and made by no thread that loads."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from support.waiting import HANG_SECONDS

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")
pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry, which vLLM brings")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvhma.vllm.telemetry import spans
from kvhma.vllm.telemetry.spans import LoadTimes, Spans
from kvhma.vllm.telemetry.tracing import Trace, traceparent_of
from support.counted import Counted

TRACE, CLIENT = "0123456789abcdef0123456789abcdef", "fedcba9876543210"
PARENT = f"00-{TRACE}-{CLIENT}-01"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans, "_tracer", lambda: provider.get_tracer("kvhma"))
    return exporter


def times(now: float, **more: Any) -> LoadTimes:
    """A load that was queued 10 s ago and started 5 s ago; each part took a second, posting half of one."""
    parts = {"planned_at": now - 4, "post_began": now - 3.5, "posted_at": now - 3, "read_at": now - 2, "ended_at": now}
    return LoadTimes(Trace(PARENT, 5.0), now - 5, **{**parts, **more})


def made(exported: InMemorySpanExporter, of: LoadTimes, rank: int = 0) -> dict[str, Any]:
    writer = Spans(rank, Counted())
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


def test_one_rank_says_what_the_scheduler_did(exported: InMemorySpanExporter) -> None:
    now = time.monotonic()
    found = made(exported, times(now), rank=1)
    assert "kvhma.claim" not in found
    assert found["kvhma.load"].start_time == found["kvhma.plan"].start_time


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
    writer = Spans(0, Counted())
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
    writer = Spans(0, counted)
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
    writer = Spans(0, Counted())
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
