# SPDX-License-Identifier: Apache-2.0
"""The schedule and the report of `make faults`, without engines."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from faults.run import LinkedSlot, ended_by_ucx
from faults.schedule import KINDS, PARTITION_SECONDS, REST_SECONDS, fault_of, schedule
from soak.schedule import Event

CUTS = ("partition", "one way")


def test_the_seed_decides() -> None:
    assert schedule(1, 600) == schedule(1, 600) != schedule(2, 600)


@pytest.mark.parametrize("seed", range(20))
def test_schedule(seed: int) -> None:
    events = schedule(seed, 600)
    assert {event.kind for event in events} == set(KINDS)
    assert all(before.at + before.seconds < event.at for before, event in itertools.pairwise(events))
    assert events[-1].at + events[-1].seconds <= 600 - REST_SECONDS
    hour = [event.seconds for event in schedule(seed, 3600) if event.kind in CUTS]
    assert set(PARTITION_SECONDS) <= set(hour)
    assert schedule(seed, 60), "a short run has faults too"


def test_strengths() -> None:
    weak, strong = (
        {kind: fault_of(Event(0, kind, "p1", 1, choice))[0] for kind in KINDS} for choice in (0.0, 0.9999999)
    )
    assert weak["loss"].loss == 0.01
    assert strong["loss"].loss == pytest.approx(0.2)
    assert weak["rate"].rate == 50_000
    assert strong["rate"].rate == pytest.approx(1_000_000, rel=1e-3)
    assert {kind for kind in KINDS if weak[kind].loss == 1} == set(CUTS)
    ways = {fault_of(Event(0, "one way", "p1", 1, choice))[1] for choice in (0.0, 0.49, 0.5, 0.9999999)}
    assert ways == {(0,), (1,)}
    assert all(fault_of(Event(0, kind, "p1", 1, 0.5))[1] == (0, 1) for kind in KINDS if kind != "one way")


def test_only_an_end_by_ucx_is_no_failure(tmp_path: Path) -> None:
    failure = "p1, life 2, ended by itself, see p1-2.log: no reason in it"
    log = tmp_path / "p1-2.log"
    log.write_text("INFO ready\nFatal Python error: Segmentation fault\n")
    assert ended_by_ucx(failure, tmp_path) == ""
    log.write_text("INFO ready\n[vm:1:0:2] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout\n")
    assert ended_by_ucx(failure, tmp_path) == (
        "p1, life 2, was ended by UCX: ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout"
    )
    assert ended_by_ucx("p1: kill: processes outlive SIGKILL", tmp_path) == ""


class FrontEnd:
    """An engine of which only the front end is left."""

    alive = True

    def pids(self) -> list[int]:
        return [os.getpid()]


def test_an_engine_without_its_core_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = LinkedSlot("p1", None, None, None)
    slot.engine = FrontEnd()
    assert not slot.crashed(), "it has not been ready"
    slot.up.set()
    slot.meant_to_end = False
    assert slot.crashed()
    monkeypatch.setattr("soak.fleet.process_name", lambda _: "VLLM::EngineCore")
    assert not slot.crashed()
