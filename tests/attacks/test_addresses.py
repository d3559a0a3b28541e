# SPDX-License-Identifier: Apache-2.0
"""Clients name addresses that never answer and addresses that refuse; D serves honest engines beside them all."""

import contextlib
import socket

import pytest

from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.loads.lease_renewer import LeaseRenewer
from kvhma.vllm.options.tickets.offers import TicketTable, answer_questions
from kvhma.vllm.options.tickets.ticket_follower import Ticket
from kvhma.vllm.options.tickets.ticket_followers import MAX_FOLLOWED, TicketFollowers
from kvhma.vllm.peers.peers import Peers
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.wire.messages import (
    PROTOCOL,
    AskEngineInfo,
    AskWorkerIdentity,
    Done,
    EngineInfo,
    Outcome,
    Release,
    SignedWorkerIdentity,
)
from kvhma.vllm.wire.params import Address, Incarnation, LeaseClaim, LeaseKey
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.engines.engine import free_port
from support.listening import HELLO, NONCE, PRIVATE_KEY
from support.waiting import HANG_SECONDS, until

SILENT, REFUSING = 500, 1000
NO_SECRETS = Secrets()
DIGEST = b"d" * 16
END = 5 * HANG_SECONDS


class P:
    """An honest engine that holds a request and computes another."""

    def __init__(self):
        self.at = Address("127.0.0.1", free_port())
        self.leases, self.tickets, self.renewed = LeaseTable(30.0), TicketTable(30.0), 0
        self.claim = LeaseClaim(LeaseKey("held", 1), 7, DIGEST)
        self.leases.hold(self.claim.key, DIGEST, [1, 2])
        renew = self.leases.renew

        def counted(claims):
            self.renewed += 1
            return renew(claims)

        self.leases.renew = counted
        self.listener = Listener(
            self.at,
            LocalEngine("p", 258, {(0, 0): (HELLO, PRIVATE_KEY)}),
            leases=self.leases,
            secrets=NO_SECRETS,
            counters=Counted(),
            handlers=answer_questions(self.tickets),
        )
        self.tickets.on_progress = self.listener.notify_progress
        self.close = self.listener.close


@pytest.mark.parametrize("met", ["before", "afterwards"])
def test_an_honest_engine_beside_500_silent_and_1000_refusing_addresses(met):
    with contextlib.ExitStack() as stack:
        p = stack.enter_context(contextlib.closing(P()))
        asking = stack.enter_context(contextlib.closing(Peers(10 * HANG_SECONDS, NO_SECRETS, Counted())))
        if asking._limit <= 3 * SILENT:
            pytest.skip("the process may not open enough files")
        renewer, followers = (
            LeaseRenewer(asking, Counted(), lambda seconds: True),
            TicketFollowers(asking, 10 * HANG_SECONDS),
        )
        if met == "before":
            asking.ask(p.at, AskEngineInfo(PROTOCOL), EngineInfo).result(END)
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(SILENT)]
        silent = [Address(*one.getsockname()) for one in listening]
        refusing = [Address(f"127.0.{number // 250 + 4}.{number % 250 + 1}", 1) for number in range(REFUSING)]
        for number, address in enumerate([*refusing, *silent]):
            renewer.track_claim(address, LeaseClaim(LeaseKey("bogus", number), 7, DIGEST), every=0.1)
            asking.ask(address, Release([], Outcome.READ), Done)
        for number, address in enumerate([*silent, *refusing][: MAX_FOLLOWED - 1]):
            followers.follow_ticket(Ticket(number.to_bytes(16, "big"), address), 100)
        # Renewals, also of a lease that D has renewed before.
        renewer.track_claim(p.at, p.claim, every=0.1)
        until(lambda: p.renewed >= 5)
        assert renewer.is_held(p.at, p.claim)
        # Tickets.
        ticket = b"t" * 16
        p.tickets.open_ticket(ticket, "followed", Incarnation(p.at, "p", 258, 1, 1), 1, 100, "a" * 32)
        follower = followers.follow_ticket(Ticket(ticket, p.at), 100)
        for tokens in (16, 32, 48):
            p.tickets.settle_tokens(ticket, tokens, {0: (16, list(range(tokens // 16)))})
            until(lambda tokens=tokens: follower.tokens == tokens)
        assert not follower.error
        # What a handshake asks.
        info = asking.ask(p.at, AskEngineInfo(PROTOCOL), EngineInfo, anew=True).result(END)
        assert info.engine_id == "p"
        identity = asking.ask(p.at, AskWorkerIdentity(0, 0, NONCE), SignedWorkerIdentity).result(END)
        assert identity.data == HELLO
        # The release, after which P may free its blocks.
        renewer.release_claim(p.at, p.claim, Outcome.READ)
        until(lambda: not len(p.leases))
