# SPDX-License-Identifier: Apache-2.0
"""Offers: for calls in any order, followers get one end, and P's blocks are released."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvhma.vllm.options.tickets import offers
from kvhma.vllm.options.tickets.messages import AskedTicket
from kvhma.vllm.options.tickets.offers import OfferState, TicketTable
from kvhma.vllm.wire.params import Address, Incarnation, LeaseClaim, LeaseKey

WALKS = 3000
TICKET = bytes(16)
SOURCE = Incarnation(Address("a", 1), "p", 7, 1, 1)
CLAIM = LeaseClaim(LeaseKey("r", 1), 0, bytes(16))


def table() -> tuple[TicketTable, list[bytes], list[LeaseClaim]]:
    """Return a table with one offer, and what the listener and the lease table get from it."""
    made, woken, released = TicketTable(30.0), [], []
    made.on_progress, made.on_cancelled = woken.append, released.append
    assert made.open_ticket(TICKET, "r", SOURCE, 2, 100, "a" * 32)
    return made, woken, released


@pytest.mark.parametrize("seed", range(200))
def test_what_followers_see_is_the_state(seed: int) -> None:
    """Each change is one version and one wake-up; a version that was seen is not sent again; an end is the last."""
    rng, (made, woken, released), seen, tokens = random.Random(seed), table(), 0, 0
    is_over = is_cancelled = is_reset = False
    state, may_release = OfferState.COMPUTING, 0
    order = list(OfferState)
    for _ in range(30):
        one = made.offer(TICKET)
        woken.clear()
        choice = rng.choice(["settle", "epoch", "cancel", "reset", "hand_off", "end"])
        if choice == "cancel":
            may_release += one.state is OfferState.HELD
            made.cancel_ticket(TICKET)
            is_cancelled = True
        elif choice == "reset":
            made.end_all("P has reset its caches")
            is_over = is_reset = True
        elif is_over:
            continue
        elif choice == "settle":
            tokens += 16
            made.settle_tokens(TICKET, tokens, {0: (16, list(range(tokens // 16)))})
        elif choice == "epoch":
            tokens = 0
            made.begin_epoch(TICKET)
        elif choice == "hand_off":
            may_release += is_cancelled
            made.hand_off(TICKET, {}, CLAIM)
            is_over = True
        else:
            made.end_ticket(TICKET, "aborted")
            is_over = True
        answer = made.progress(AskedTicket(TICKET, seen, 0, 0))
        assert woken == ([] if answer is None else [TICKET])
        assert order.index(one.state) >= order.index(state), "it goes back"
        assert answer is None or state is not OfferState.ENDED, "followers get two ends"
        state = one.state
        assert state is not OfferState.COMPUTING or not (is_over or is_cancelled), "followers wait for an end that came"
        assert state is not OfferState.HELD or not is_reset, "followers read what P has reset"
        assert released == [CLAIM] * may_release
        assert (TICKET in made._over) == is_over, "P forgets it never, or before its request is over"
        if answer is not None:
            assert answer.version > seen
            seen = answer.version
            assert (bool(answer.params), bool(answer.ended)) == (state is OfferState.HELD, state is OfferState.ENDED)
            assert [blocks.ids for blocks in answer.blocks] == (
                [f"0-{tokens // 16 - 1}" if tokens > 16 else "0"] if tokens and state is OfferState.COMPUTING else []
            )


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
    now = 131.0
    assert made.open_ticket(bytes(15) + b"2", "new", SOURCE, 2, 100, "")
    assert len(made) == 2
    assert made.progress(AskedTicket(TICKET, 1, 0, 0)) is not None, "it was known: the answer says that it is not"
    made.end_ticket(other, "aborted")


def test_a_request_that_outlives_its_reset_offer_by_long_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may preempt requests for a reset, and compute them afterwards, for longer than followers may ask."""
    now = 100.0
    monkeypatch.setattr(offers, "time", SimpleNamespace(monotonic=lambda: now))
    made, woken, released = table()
    made.end_all("P has reset its caches")
    now = 131.0
    made.open_ticket(bytes(15) + b"1", "new", SOURCE, 2, 100, "")
    woken.clear()
    made.begin_epoch(TICKET)
    made.settle_tokens(TICKET, 16, {})
    made.hand_off(TICKET, {}, CLAIM)
    made.end_ticket(TICKET, "aborted")
    assert (len(made), woken, released) == (1, [], [CLAIM])
