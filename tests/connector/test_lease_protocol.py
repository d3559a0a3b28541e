# SPDX-License-Identifier: Apache-2.0
"""The protocol of leases, every interleaving of it: no stale read is accepted, and no block is kept for ever.

Two readers of one request, a restart of P, a lost or late message at every point, P's real table of leases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvhma.vllm.scheduler import lease_table
from kvhma.vllm.scheduler.lease_table import LeaseTable
from kvhma.vllm.wire.messages import LeaseState
from kvhma.vllm.wire.params import LeaseClaim
from support.lease_protocol import DIGEST, LEASE, Clock, Explorer, Phase, Rules, World

MakeExplorer = Callable[..., Explorer]


class KeepsEnded(LeaseTable):
    """Extends a lease that has run out, as if the clock of the renewal were that of the table."""

    def renew(self, claims: list[LeaseClaim]) -> list[LeaseState]:
        return [LeaseState.HELD if claim.key in self._held else LeaseState.ENDED for claim in claims]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeExplorer:
    clock = Clock()
    monkeypatch.setattr(lease_table, "time", clock)

    def explorer(
        rules: Rules = Rules(), table: type[LeaseTable] = LeaseTable, *, generations: bool = True
    ) -> Explorer:
        # A restarted P has other random numbers than the one before it.
        numbers = itertools.count() if generations else itertools.repeat(0)
        monkeypatch.setattr(lease_table, "new_nonce", lambda: next(numbers))
        return Explorer(rules, clock, lambda: table(LEASE), lambda of: of.add("request", DIGEST, 1))

    return explorer


def stale(world: World) -> bool:
    """Whether a reader has accepted what it read, and it was not what P handed over."""
    return any(reader.phase is Phase.ACCEPTED and not reader.right for reader in world.readers)


def test_no_stale_read_is_accepted_and_no_block_is_kept_for_ever(make: MakeExplorer) -> None:
    explorer = make()
    accepted: set[tuple[bool, bool]] = set()
    for world in explorer.explore():
        assert not stale(world), "\n".join(world.path)
        assert explorer.frees_at_last(world), "\n".join(world.path)
        phases = [reader.phase for reader in world.readers]
        accepted.add((phases.count(Phase.ACCEPTED) == 2, world.restarted))
    print(f"{explorer.visited:,} worlds")
    # It went where it should: both readers accept, and one does so before P restarts.
    assert accepted == {(False, False), (False, True), (True, False), (True, True)}
    assert explorer.visited > 10_000


@pytest.mark.parametrize(
    ("what", "rules", "table", "generations"),
    [
        ("a reader asks before it reads", Rules(ask_after_read=False), LeaseTable, True),
        ("P frees while a lease runs", Rules(free_after_end=False), LeaseTable, True),
        ("a lease that ended is extended", Rules(), KeepsEnded, True),
        ("a restarted P does not know its requests from older ones", Rules(), LeaseTable, False),
    ],
)
def test_a_wrong_protocol_is_found(
    make: MakeExplorer, what: str, rules: Rules, table: type[LeaseTable], generations: bool
) -> None:
    explorer = make(rules, table, generations=generations)
    found = next((world.path for world in explorer.explore() if stale(world)), None)
    assert found is not None, what
    print(what, *found, sep="\n  ")
