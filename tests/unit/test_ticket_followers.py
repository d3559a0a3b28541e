# SPDX-License-Identifier: Apache-2.0
"""D stops following a ticket after a time limit, even if P replies. The tests move the clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvhma.errors import RequestError
from kvhma.vllm.options.tickets import ticket_follower
from kvhma.vllm.options.tickets.messages import Progress
from kvhma.vllm.options.tickets.ticket_follower import Ticket, TicketFollower
from kvhma.vllm.wire.params import Address

TOKENS = 1_000_000
STALL, LONGEST = ticket_follower._STALL_SECONDS, ticket_follower._LONGEST_SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(ticket_follower, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def follower(clock: SimpleNamespace) -> TicketFollower:
    made = TicketFollower(Ticket(bytes(16), Address("p", 1)), TOKENS, begun=clock.now)
    report(made)
    return made


def report(follower: TicketFollower, **more: Any) -> None:
    values = {"engine_id": "p", "groups": 1, "total": TOKENS, "prompt": "a" * 32, "epoch": 1} | more
    follower.on_progress(Progress(follower.version + 1, **values))


def seconds_until_end(
    follower: TicketFollower, clock: SimpleNamespace, do: Callable[[], None] = lambda: None
) -> tuple[float, str]:
    """Return how long D follows, and why it ends; P does something every ten seconds."""
    began = clock.now
    while True:
        try:
            follower.check_time()
        except RequestError as error:
            return clock.now - began, str(error)
        clock.now += 10.0
        do()


def test_p_that_answers_and_computes_nothing_ends(follower: TicketFollower, clock: SimpleNamespace) -> None:
    follower.on_blocks_allocated()
    seconds, why = seconds_until_end(follower, clock, lambda: report(follower))
    assert STALL < seconds <= STALL + 10
    assert f"p:1 has computed no more of the prompt for {STALL:.0f} s" in why
    assert follower.is_late


def test_a_request_may_wait_without_blocks_in_the_queue_of_p(follower: TicketFollower, clock: SimpleNamespace) -> None:
    seconds, why = seconds_until_end(follower, clock, lambda: report(follower))
    assert LONGEST < seconds <= LONGEST + 10
    assert "has not handed off the request within 14400 s" in why


def test_a_new_epoch_does_not_extend_the_time(follower: TicketFollower, clock: SimpleNamespace) -> None:
    follower.on_blocks_allocated()
    tokens = [0]

    def begin_again() -> None:
        tokens[0] = (tokens[0] + 16) % 64
        report(follower, epoch=follower.epoch + (not tokens[0]), tokens=tokens[0])

    seconds, _ = seconds_until_end(follower, clock, begin_again)
    assert seconds <= STALL + 40
    assert follower.epoch > 40


def test_one_token_at_a_time_ends_too(follower: TicketFollower, clock: SimpleNamespace) -> None:
    follower.on_blocks_allocated()
    seconds, why = seconds_until_end(follower, clock, lambda: report(follower, tokens=follower.tokens + 1))
    assert LONGEST < seconds <= LONGEST + 10
    assert "within" in why


def test_a_slow_p_with_progress_goes_on(follower: TicketFollower, clock: SimpleNamespace) -> None:
    """Half of the prompt comes after nearly an hour, and the rest after as long again."""
    follower.on_blocks_allocated()
    for tokens in (0, TOKENS // 2, TOKENS - 1):
        report(follower, tokens=tokens)
        clock.now += STALL - 1
        follower.check_time()
