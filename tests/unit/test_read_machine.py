# SPDX-License-Identifier: Apache-2.0
"""The state machine of a read: for events in any order, nothing unproved is copied and all is released once."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvhma.errors import HandshakeTimeoutError, PeerLostError, TransferError
from kvhma.vllm.reads.read_machine import TABLE, ActiveRead, ReadEffect, ReadEvent, ReadState, required

WALKS = 3000
PROOFS = {ReadEvent.PIECE, ReadEvent.ON_BOARD, ReadEvent.HELD, ReadEvent.SUMMED}


def new() -> ActiveRead:
    return ActiveRead(SimpleNamespace(request_id="r"), 0.0)  # type: ignore[arg-type]


def walk(seed: int) -> list[tuple[ReadState, ReadEvent, ReadState, tuple[ReadEffect, ...]]]:
    """Give a read random events that are possible in its state, until it is reported."""
    rng, read, is_planned, steps = random.Random(seed), new(), False, []
    while read.state is not ReadState.REPORTED:
        state = read.state
        events = [event for at, event in TABLE if at is state]
        events = [event for event in events if event is not (ReadEvent.KNOWN if is_planned else ReadEvent.KNOWN_AGAIN)]
        if rng.random() < 0.9 and state is not ReadState.CONNECTING:
            events = [event for event in events if event is not ReadEvent.FAILED] or events
        event = rng.choice(events)
        effects = read.apply(event)
        is_planned |= ReadEffect.PLAN in effects
        steps.append((state, event, read.state, effects))
    return steps


@pytest.mark.parametrize("part", range(3))
def test_every_way_ends_well(part: int) -> None:
    for seed in range(part, WALKS, 3):
        steps = walk(seed)
        events = [event for _, event, _, _ in steps]
        done = [effect for *_, effects in steps for effect in effects]
        assert done.count(ReadEffect.CLEAN_UP) == events.count(ReadEvent.REPORTED) == 1
        # Nothing that could still write to the places is in flight when they are released.
        released = next(index for index, (*_, effects) in enumerate(steps) if ReadEffect.CLEAN_UP in effects)
        assert events[released] in (ReadEvent.COPIED, ReadEvent.DRAINED)
        assert ReadState.POSTING not in {state for _, _, state, _ in steps[released:]}
        # The blocks get only bytes that P has held all the time, and of a failed read none.
        for index, (_, event, following, effects) in enumerate(steps):
            if ReadEffect.COPY in effects:
                assert event in PROOFS
                assert following is ReadState.COPYING
                assert ReadState.DRAINING not in {state for _, _, state, _ in steps[:index]}
            if following is ReadState.POSTING:
                assert event in (ReadEvent.ZEROED, ReadEvent.KNOWN_AGAIN)
        assert done.count(ReadEffect.PLAN) <= 1
        assert done.count(ReadEffect.COMPARE) <= done.count(ReadEffect.LEAVE_ENGINE) == events.count(ReadEvent.LOST)


USUAL = "KNOWN PLACES ZEROED POSTED READ PERMUTED"
READ = "PLAN PERMUTE NOTE_READ SUM"
STORIES = {
    "a read": (f"{USUAL} ON_BOARD COPIED REPORTED", f"{READ} COPY CLEAN_UP"),
    "an unknown engine": (
        f"HANDSHAKE HANDSHAKE_ENDED {USUAL} QUESTION HELD COPIED REPORTED",
        f"{READ} COPY CLEAN_UP",
    ),
    "a piece": (f"{USUAL} PIECE COPIED REPORTED", f"{READ} COPY CLEAN_UP"),
    "digests": (
        f"{USUAL} QUESTION NO_DIGEST QUESTION DIGEST SUMMED COPIED REPORTED",
        f"{READ} COPY CLEAN_UP",
    ),
    "a lost part": (
        "KNOWN PLACES ZEROED POSTED LOST HANDSHAKE HANDSHAKE_ENDED KNOWN_AGAIN POSTED READ PERMUTED ON_BOARD COPIED "
        "REPORTED",
        "PLAN LEAVE_ENGINE COMPARE PERMUTE NOTE_READ SUM COPY CLEAN_UP",
    ),
    "no P": ("HANDSHAKE FAILED DRAINED REPORTED", "SAVE_CASE CLEAN_UP"),
    "blocks that P has freed": (f"{USUAL} QUESTION FAILED DRAINED REPORTED", f"{READ} SAVE_CASE CLEAN_UP"),
    "an error of the report": (f"{USUAL} ON_BOARD COPIED FAILED REPORTED", f"{READ} COPY CLEAN_UP"),
}


@pytest.mark.parametrize(("events", "effects"), STORIES.values(), ids=STORIES)
def test_stories(events: str, effects: str) -> None:
    read = new()
    done = [effect.name for event in events.split() for effect in read.apply(ReadEvent[event])]
    assert (read.state, " ".join(done)) == (ReadState.REPORTED, effects)


def test_the_table_has_no_dead_ends_and_nothing_unused() -> None:
    states = {state for state, _ in TABLE} | {state for state, _ in TABLE.values()}
    assert states == set(ReadState)
    assert {event for _, event in TABLE} == set(ReadEvent)
    assert {effect for _, effects in TABLE.values() for effect in effects} == set(ReadEffect)
    assert {state for state in ReadState if (state, ReadEvent.FAILED) not in TABLE} == {ReadState.REPORTED}
    assert {state for seed in range(WALKS) for _, _, state, _ in walk(seed)} == states


def test_an_event_that_a_state_cannot_meet_changes_nothing() -> None:
    read = new()
    with pytest.raises(KeyError):
        read.apply(ReadEvent.READ)
    assert read.state is ReadState.QUEUED


def test_the_first_error_counts_and_one_after_a_lost_connection_names_both() -> None:
    read = new()
    first, second = TransferError("first"), TransferError("second")
    read.fail(first)
    read.fail(second)
    assert (read.error, read.state) == (first, ReadState.DRAINING)
    read = new()
    read.lost = PeerLostError("cut off")
    read.fail(HandshakeTimeoutError("no answer"))
    assert (type(read.error), str(read.error)) == (PeerLostError, "cut off; and reconnecting: no answer")


def test_what_a_read_does_not_hold_is_an_error() -> None:
    assert required(0) == 0
    with pytest.raises(RuntimeError, match="does not hold"):
        required(None)
