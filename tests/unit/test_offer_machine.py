# SPDX-License-Identifier: Apache-2.0
"""The state machine of an offer: for events in any order, followers get one end, and P's blocks are released."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvhma.vllm.holds import offers
from kvhma.vllm.holds.offers import TABLE, Offer, OfferEffect, OfferEvent, OfferState, TicketTable
from kvhma.vllm.wire.messages import AskedTicket
from kvhma.vllm.wire.params import Address, Incarnation, LeaseClaim, LeaseKey

WALKS = 3000
TICKET = bytes(16)
SOURCE = Incarnation(Address("a", 1), "p", 7, 1, 1)
CLAIM = LeaseClaim(LeaseKey("r", 1), 0, bytes(16))
OVER = {OfferEvent.HANDED_OFF, OfferEvent.NOT_HELD, OfferEvent.RESET}
"""After one of these P's request is over: it settles and ends no more."""
RUNNING = {OfferEvent.SETTLED, OfferEvent.OVERWRITTEN, OfferEvent.HANDED_OFF, OfferEvent.NOT_HELD}


def offer() -> Offer:
    return Offer(TICKET, "r", SOURCE, 2, 100, "a" * 32)


def walk(seed: int) -> list[tuple[OfferState, OfferEvent, OfferState, tuple[OfferEffect, ...]]]:
    """Give an offer random events that are possible in its state, until P forgets it."""
    rng, one, steps, is_over, event = random.Random(seed), offer(), [], False, None
    while event is not OfferEvent.FORGOTTEN:
        state = one.state
        events = {event for at, event in TABLE if at is state}
        events -= RUNNING if is_over else {OfferEvent.FORGOTTEN}
        event = rng.choice(sorted(events, key=lambda event: event.name))
        is_over |= event in OVER
        effects = one.apply(event)
        steps.append((state, event, one.state, effects))
    return steps


@pytest.mark.parametrize("part", range(3))
def test_every_way_ends_well(part: int) -> None:
    order = list(OfferState)
    for seed in range(part, WALKS, 3):
        steps = walk(seed)
        assert steps[-1][2] is OfferState.ENDED
        assert all(order.index(state) <= order.index(following) for state, _, following, _ in steps), "it goes back"
        over = [index for index, (_, event, _, _) in enumerate(steps) if event in OVER]
        kept = [index for index, (*_, effects) in enumerate(steps) if OfferEffect.KEEP_FOR_A_WHILE in effects]
        assert kept[0] == over[0], "P forgets it never, or before its request is over"
        for state, event, following, effects in steps:
            if OfferEffect.PUBLISH in effects:
                assert state is not OfferState.ENDED, "followers get two ends"
            elif state is not following:
                assert event is OfferEvent.FORGOTTEN, "followers wait for an end that came"
        # P's blocks are released if a follower has cancelled the request, before or after the hand-off.
        events = [event for _, event, _, _ in steps]
        held = events.index(OfferEvent.HANDED_OFF) if OfferEvent.HANDED_OFF in events else len(events)
        slept = events.index(OfferEvent.RESET) if OfferEvent.RESET in events else len(events)
        cancelled = [i for i, event in enumerate(events) if event is OfferEvent.CANCELLED and i < slept]
        released = any(OfferEffect.RELEASE in effects for *_, effects in steps)
        assert released == (bool(cancelled) and held < len(events))


STORIES = {
    "a hand-off": ("SETTLED SETTLED HANDED_OFF FORGOTTEN", "PUBLISH PUBLISH PUBLISH KEEP_FOR_A_WHILE"),
    "a preemption": ("SETTLED OVERWRITTEN SETTLED", "PUBLISH PUBLISH PUBLISH"),
    "an abort at P": ("SETTLED NOT_HELD FORGOTTEN", "PUBLISH PUBLISH KEEP_FOR_A_WHILE"),
    "an abort at D": ("SETTLED CANCELLED SETTLED NOT_HELD", "PUBLISH PUBLISH KEEP_FOR_A_WHILE"),
    "an abort at D as P ends": ("CANCELLED HANDED_OFF", "PUBLISH KEEP_FOR_A_WHILE RELEASE"),
    "one sample is cancelled": ("HANDED_OFF CANCELLED FORGOTTEN", "PUBLISH KEEP_FOR_A_WHILE RELEASE"),
    "sleep": ("HANDED_OFF RESET CANCELLED", "PUBLISH KEEP_FOR_A_WHILE PUBLISH"),
}


@pytest.mark.parametrize(("events", "effects"), STORIES.values(), ids=STORIES)
def test_stories(events: str, effects: str) -> None:
    one = offer()
    done = [effect.name for event in events.split() for effect in one.apply(OfferEvent[event])]
    assert " ".join(done) == effects


def test_the_table_has_no_dead_ends_and_nothing_unused() -> None:
    states = {state for state, _ in TABLE} | {state for state, _ in TABLE.values()}
    assert states == set(OfferState)
    assert {event for _, event in TABLE} == set(OfferEvent)
    assert {effect for _, effects in TABLE.values() for effect in effects} == set(OfferEffect)
    walked = {(state, event) for seed in range(WALKS) for state, event, _, _ in walk(seed)}
    assert walked == set(TABLE)


def test_an_event_that_a_state_cannot_meet_changes_nothing() -> None:
    one = offer()
    with pytest.raises(KeyError):
        one.apply(OfferEvent.FORGOTTEN)
    assert one.state is OfferState.COMPUTING


def table() -> tuple[TicketTable, list[bytes], list[LeaseClaim]]:
    """Return a table with one offer, and what the listener and the lease table get from it."""
    made, woken, released = TicketTable(30.0), [], []
    made.on_progress, made.on_cancelled = woken.append, released.append
    assert made.open_ticket(TICKET, "r", SOURCE, 2, 100, "a" * 32)
    return made, woken, released


@pytest.mark.parametrize("seed", range(20))
def test_what_followers_see_is_the_state(seed: int) -> None:
    """Each change is one version and one wake-up; a version that was seen is not sent again."""
    rng, (made, woken, released), seen, tokens, is_over = random.Random(seed), table(), 0, 0, False
    for _ in range(30):
        one = made.offer(TICKET)
        woken.clear()
        choice = rng.choice(["settle", "epoch", "cancel", "sleep", "hand_off", "end"])
        if choice == "cancel":
            made.cancel_ticket(TICKET)
        elif choice == "sleep":
            made.end_all("P has slept")
            is_over = True
        elif is_over:
            continue
        elif choice == "settle":
            tokens += 16
            made.settle_tokens(TICKET, tokens, {0: (16, list(range(tokens // 16)))})
        elif choice == "epoch":
            tokens = 0
            made.begin_epoch(TICKET)
        elif choice == "hand_off":
            made.hand_off(TICKET, {}, CLAIM)
            is_over = True
        else:
            made.end_ticket(TICKET, "aborted")
            is_over = True
        answer = made.progress(AskedTicket(TICKET, seen, 0, 0))
        assert woken == ([] if answer is None else [TICKET])
        if answer is not None:
            assert answer.version > seen
            seen = answer.version
            assert (bool(answer.params), bool(answer.ended)) == (
                one.state is OfferState.HELD,
                one.state is OfferState.ENDED,
            )
            assert [blocks.ids for blocks in answer.blocks] == (
                [f"0-{tokens // 16 - 1}" if tokens > 16 else "0"]
                if tokens and one.state is OfferState.COMPUTING
                else []
            )
    assert set(released) <= {CLAIM}


def test_a_ticket_that_was_cancelled_before_p_knew_it_is_of_no_use() -> None:
    made = TicketTable(30.0)
    made.cancel_ticket(TICKET)
    assert made.open_ticket(TICKET, "r", SOURCE, 2, 100, "a" * 32)
    assert made.offer(TICKET).state is OfferState.ENDED
    answer = made.progress(AskedTicket(TICKET, 0, 0, 0))
    assert answer is not None
    assert "cancelled" in answer.ended


def test_blocks_of_a_request_that_was_cancelled_as_it_ended_are_released() -> None:
    made, _, released = table()
    made.cancel_ticket(TICKET)
    made.hand_off(TICKET, {}, CLAIM)
    assert released == [CLAIM]


def test_parameters_that_cannot_be_sent_end_the_offer_and_not_the_engine() -> None:
    made, _, _ = table()
    made.hand_off(TICKET, {"remote_request_id": "\ud800"}, CLAIM)
    assert (made.offer(TICKET).state, made.offer(TICKET).params) == (OfferState.ENDED, offers.NO_PARAMS)
    assert "cannot be sent" in made.offer(TICKET).ended


def test_p_forgets_what_is_over_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(offers, "time", SimpleNamespace(monotonic=lambda: now))
    made, _, _ = table()
    other = bytes(15) + b"1"
    made.open_ticket(other, "other", SOURCE, 2, 100, "")
    made.cancel_ticket(other)  # P still computes it
    made.hand_off(TICKET, {}, CLAIM)
    one, now = made.offer(TICKET), 131.0
    assert made.open_ticket(bytes(15) + b"2", "new", SOURCE, 2, 100, "")
    assert (len(made), one.state) == (2, OfferState.ENDED)
    assert made.progress(AskedTicket(TICKET, 1, 0, 0)) is not None, "it was known: the answer says that it is not"
    made.end_ticket(other, "aborted")
