# SPDX-License-Identifier: Apache-2.0
"""The schedule, the engines and the report of `make faults`, without engines that run."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from faults.run import REQUESTS, Ends, LinkedRun, LinkedSite, LinkedSlot
from faults.schedule import KINDS, PARTITION_SECONDS, REST_SECONDS, fault_of, schedule
from soak.journal import Journal, read_lines
from soak.judge import Tally
from soak.report import report
from soak.run import Options, make_slots
from soak.schedule import ALL, Event
from support.link import Fault

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


class FakeLink:
    """Counts a packet of each direction whenever its fault changes."""

    addresses = ("10.79.0.1", "10.79.0.2")

    def __init__(self) -> None:
        self.faults: list[tuple[Fault, Sequence[int]]] = []

    def set(self, fault: Fault, directions: Sequence[int] = (0, 1)) -> list[Counter[str]]:
        self.faults.append((fault, directions))
        return [Counter(packets=len(self.faults)) for _ in range(2)]

    def env(self, side: int) -> dict[str, str]:
        return {"KVHMA_E2E_NETNS": "pd"[side], "VLLM_NIXL_SIDE_CHANNEL_HOST": self.addresses[side]}


def make_site(folder: Path) -> tuple[LinkedSite, FakeLink, Journal]:
    link, journal = FakeLink(), Journal(folder / "journal.jsonl")
    return LinkedSite(folder, journal, cast("Any", link)), link, journal


def test_a_fault_is_noted_and_undone(tmp_path: Path) -> None:
    site, link, journal = make_site(tmp_path)
    (tmp_path / "samples.csv").touch()
    journal.note("load", model="gemma3")
    site.do(Event(0.0, "one way", ALL, 0.01, 0.7), [], threading.Event())
    journal.note("fact", text="packets from P: {}")
    journal.close()
    assert link.faults == [(Fault(loss=1), (1,)), (Fault(), (0, 1))]
    over = read_lines(tmp_path / "journal.jsonl")[-2]
    assert (over["what"], over["from_p"], over["from_d"]) == ("event over", {"packets": 1}, {"packets": 1})
    lines, failed = report(tmp_path)
    assert not failed
    assert "events: one way 1; 0 left out" in lines
    assert "packets from P: {}" in lines


def test_p_and_d_are_at_two_ends(tmp_path: Path) -> None:
    site, link, journal = make_site(tmp_path)
    options = Options(60.0, 7, ("gemma3",), 12, 0, (), REQUESTS, one_host=False, limit=400.0)
    run = LinkedRun(options, tmp_path, journal, site, Ends(cast("Any", link)), cast("Any", None))
    p1, d1, d2 = slots = make_slots(run, "gemma3", tmp_path)
    assert all(isinstance(slot, LinkedSlot) for slot in slots)
    assert [slot.template.env["KVHMA_E2E_NETNS"] for slot in slots] == ["p", "d", "d"]
    port = p1.template.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    known = [
        json.loads(json.dumps(slot.template.kv_transfer_config))["kv_connector_extra_config"].get("prefill_engines")
        for slot in (d1, d2)
    ]
    assert known == [[f"10.79.0.1:{port}"], None], "D looks for P at P's end"
    assert {slot.template.http for slot in slots} == {None}, "clients do not reach these ends"
    assert run.events("gemma3", 60.0) == schedule(7, 60.0)
    journal.close()


def test_an_engine_that_ends_by_itself_is_a_failure_even_if_ucx_ended_it(tmp_path: Path) -> None:
    site, _, journal = make_site(tmp_path)
    slot = LinkedSlot("p1", cast("Any", None), journal, None, site, ())
    slot.life = 2
    slot.engine = cast("Any", SimpleNamespace(log=tmp_path / "p1-2.log"))
    for words in (
        "Fatal Python error: Segmentation fault",
        "[vm:1:0:2] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout",
    ):
        slot.engine.log.write_text(f"INFO ready\n{words}\n")
        slot.note_crash()
    journal.close()
    lines = read_lines(tmp_path / "journal.jsonl")
    assert [line["text"] for line in lines if line["what"] == "crash"] == [
        f"p1, life 2, ended by itself, see p1-2.log: {words}"
        for words in (
            "Fatal Python error: Segmentation fault",
            "[vm:1:0:2] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout",
        )
    ]
    assert Tally.of(lines).failed
