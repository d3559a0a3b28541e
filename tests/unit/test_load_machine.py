# SPDX-License-Identifier: Apache-2.0
"""The state machine of a load: for events in any order, P's blocks are released once and tickets end once."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhma.vllm.loads.load_machine import TABLE, Load, LoadEffect, LoadEvent, Loads, LoadState
from support.programs import program

machines = program("tools/machines.py")
RELEASES = {effect for effect in LoadEffect if effect.name.startswith("RELEASE")}
TICKET_ENDS = {effect for effect in LoadEffect if effect.name.startswith("TICKET_")}
WALKS = 3000


def load(name: str = "r") -> Load:
    return Load(SimpleNamespace(request_id=name))


def walk(seed: int) -> list[tuple[LoadState, LoadEvent, LoadState, tuple[LoadEffect, ...]]]:
    """Give a load random events that are possible in its state, until it ends."""
    rng, loads, one, steps = random.Random(seed), Loads(), load(), []
    while not one.state.is_end:
        state = one.state
        event = rng.choice([event for at, event in TABLE if at is state])
        effects = loads.apply(one, event)
        if LoadEffect.CLAIM in effects:
            loads.claimed(one, ("a claim",))  # type: ignore[arg-type]
        assert ("r" in loads.by_id) is not one.state.is_end
        assert ("r" in loads.unclaimed) <= (one.claim is None and not one.state.is_end)
        assert [found.state for found in loads.comparing.values()] == [LoadState.COMPARING] * (
            one.state is LoadState.COMPARING
        )
        steps.append((state, event, one.state, effects))
    assert not loads.unclaimed
    return steps


@pytest.mark.parametrize("part", range(3))
def test_every_way_ends_well(part: int) -> None:
    for seed in range(part, WALKS, 3):
        steps = walk(seed)
        events = [event for _, event, _, _ in steps]
        states = [state for _, _, state, _ in steps]
        done = [effect for *_, effects in steps for effect in effects]
        # P gets one release of its blocks for this prompt, and none for another prompt.
        is_read = LoadState.LOADING in states
        accepted = is_read or LoadEvent.SAME_PROMPT in events or LoadEvent.OPTIONAL in events
        assert sum(effect in RELEASES for effect in done) == accepted
        # A ticket ends once, before the whole prompt is read.
        assert sum(effect in TICKET_ENDS for effect in done) == events.count(LoadEvent.TICKET)
        # D requests a load only once it has blocks. A failure is reported once, and nothing is read after it.
        for state, event, following, effects in steps:
            if LoadEffect.ORDER in effects:
                assert event in (LoadEvent.BLOCKS, LoadEvent.SETTLED, LoadEvent.HANDED_OFF)
                assert following in (LoadState.LOADING, LoadState.PIECES)
            assert (LoadEffect.REPORT_FAILED in effects) == (following is LoadState.FAILING is not state)
        assert done.count(LoadEffect.REPORT_FAILED) <= 1
        assert done.count(LoadEffect.COMPUTE_LOCALLY) == (states[-1] is LoadState.LOCAL)


STORIES = {
    "a hand-off": ("PARAMS SAME_PROMPT BLOCKS LOADED", "GONE", "ORDER RELEASE_UNNOTIFIED"),
    "a long one": ("PARAMS SAME_PROMPT LASTS BLOCKS LOADED", "GONE", "CLAIM ORDER RELEASE_UNNOTIFIED"),
    "a sample": ("PARAMS SAME_PROMPT SHARED HELD BLOCKS LOADED", "GONE", "CLAIM ORDER RELEASE_UNNOTIFIED"),
    "a late reader": ("PARAMS SAME_PROMPT SHARED LOCAL", "LOCAL", "CLAIM COMPUTE_LOCALLY RELEASE"),
    "a late reader that fails": (
        "PARAMS SAME_PROMPT SHARED REFUSED BLOCKS FAILED",
        "GONE",
        "CLAIM RELEASE_UNREAD REPORT_FAILED",
    ),
    "another prompt": ("PARAMS LOCAL", "LOCAL", "COMPUTE_LOCALLY"),
    "another prompt that fails": ("PARAMS REFUSED BLOCKS FAILED", "GONE", "REPORT_FAILED"),
    "a second try": (
        "PARAMS SAME_PROMPT BLOCKS FAILED_TRANSIENT BLOCKS LOADED",
        "GONE",
        "ORDER ORDER RELEASE_UNNOTIFIED",
    ),
    "no blocks for a second try": (
        "PARAMS SAME_PROMPT BLOCKS FAILED_TRANSIENT LASTS LOCAL",
        "LOCAL",
        "ORDER CLAIM COMPUTE_LOCALLY RELEASE",
    ),
    "an abort while it is read": ("PARAMS SAME_PROMPT BLOCKS ABORTED FAILED", "GONE", "ORDER RELEASE_FAILED"),
    "an abort before": ("PARAMS SAME_PROMPT ABORTED", "GONE", "RELEASE"),
    "a stop before": ("PARAMS SAME_PROMPT ENDED", "GONE", "RELEASE_UNREAD"),
    "a ticket": (
        "TICKET BLOCKS SETTLED SETTLED HANDED_OFF LOADED",
        "GONE",
        "PLACE ORDER ORDER TICKET_HANDED_OFF ORDER RELEASE_UNNOTIFIED",
    ),
    "a ticket without room": (
        "TICKET HANDED_OFF PARAMS SAME_PROMPT BLOCKS LOADED",
        "GONE",
        "TICKET_LATE ORDER RELEASE_UNNOTIFIED",
    ),
    "a ticket that is lost": ("TICKET BLOCKS TICKET_LOST FAILED", "GONE", "PLACE TICKET_LOST REPORT_FAILED"),
    "a ticket that is aborted": (
        "TICKET BLOCKS SETTLED ABORTED CANCELLED FAILED",
        "GONE",
        "PLACE ORDER TICKET_CANCELLED CANCEL_READ RELEASE_FAILED",
    ),
    "a next turn": ("OPTIONAL HELD BLOCKS LOADED", "GONE", "CLAIM ORDER RELEASE_UNNOTIFIED"),
    "a next turn that P has evicted": ("OPTIONAL LOCAL", "LOCAL", "CLAIM COMPUTE_LOCALLY RELEASE"),
}


@pytest.mark.parametrize(("events", "end", "effects"), STORIES.values(), ids=STORIES)
def test_stories(events: str, end: str, effects: str) -> None:
    loads, one = Loads(), load()
    done = [effect.name for event in events.split() for effect in loads.apply(one, LoadEvent[event])]
    assert (one.state.name, " ".join(done)) == (end, effects)


def test_the_table_has_no_dead_ends_and_nothing_unused() -> None:
    states = {state for state, _ in TABLE} | {state for state, _ in TABLE.values()}
    assert states == set(LoadState)
    assert {event for _, event in TABLE} == set(LoadEvent)
    assert {effect for _, effects in TABLE.values() for effect in effects} == set(LoadEffect)
    assert {state for state in LoadState if not any(at is state for at, _ in TABLE)} == {
        LoadState.LOCAL,
        LoadState.GONE,
    }
    reached = {state for seed in range(WALKS) for _, _, state, _ in walk(seed)}
    assert reached == states


def test_an_event_that_a_state_cannot_meet_changes_nothing() -> None:
    loads, one = Loads(), load()
    loads.apply(one, LoadEvent.PARAMS)
    with pytest.raises(KeyError):
        loads.apply(one, LoadEvent.LOADED)
    assert (one.state, list(loads.by_id), [found is one for found in loads.comparing.values()]) == (
        LoadState.COMPARING,
        ["r"],
        [True],
    )


def test_attempts_are_counted_and_forget_the_last_reports() -> None:
    one: Any = load()
    one.begin_attempt()
    one.attempt.rank_failed = one.attempt.verified_by_board = True
    one.attempt.first_tokens[0] = 5
    one.begin_attempt()
    assert (one.attempt.number, one.attempt.rank_failed, one.attempt.verified_by_board) == (2, False, False)
    assert one.attempt.first_tokens == {}


def test_the_page_has_the_table() -> None:
    """If this fails, run `python tools/machines.py`."""
    page = (Path(__file__).parents[2] / "docs/state-machines.md").read_text(encoding="utf-8")
    assert machines.filled(page) == page
    with pytest.raises(ValueError, match="no line"):
        machines.filled(page.replace("end of loads", ""))
