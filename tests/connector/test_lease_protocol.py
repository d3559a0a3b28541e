# SPDX-License-Identifier: Apache-2.0
"""The protocol of leases in every interleaving: no stale read is accepted, and no block is held for ever.

Two readers of one request, a restart of P, a lost or late message at every point, P's real table of leases.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, repeat

import pytest

from kvhma.vllm.holds import lease_table
from kvhma.vllm.holds.lease_table import EndedLease, LeaseEnd, LeaseTable
from kvhma.vllm.wire.params import LeaseKey
from support.lease_protocol import DIGEST, LEASE, Clock, Explorer, Phase, Rules, World

MakeExplorer = Callable[..., Explorer]
HONEST = Rules()


class FreesWithoutEnding(LeaseTable):
    """Frees blocks, and continues to extend the lease."""

    def drain_ended(self) -> dict[LeaseEnd, list[EndedLease]]:
        kept = dict(self._held)
        ended = super().drain_ended()
        self._held = kept
        return ended


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeExplorer:
    clock = Clock()
    monkeypatch.setattr(lease_table, "time", clock)

    def explorer(rules: Rules = HONEST, table: type[LeaseTable] = LeaseTable, *, generations: bool = True) -> Explorer:
        # A restarted P has other random numbers.
        numbers = count() if generations else repeat(0)

        def hand_over(at: LeaseTable) -> LeaseKey:
            key = LeaseKey("request", next(numbers))
            at.hold(key, DIGEST, [3, 4])
            return key

        return Explorer(rules, clock, lambda: table(LEASE), hand_over)

    return explorer


def stale(world: World) -> bool:
    """Whether a reader has accepted what it read although P had overwritten it."""
    return any(reader.phase is Phase.ACCEPTED and not reader.right for reader in world.readers)


def test_no_stale_read_is_accepted_and_no_block_is_kept_for_ever(make: MakeExplorer) -> None:
    explorer = make()
    worlds = 0
    seen = set()
    for world in explorer.explore():
        worlds += 1
        assert not stale(world), "\n".join(explorer.path(world))
        assert explorer.frees_at_last(world), "\n".join(explorer.path(world))
        accepted = sum(reader.phase is Phase.ACCEPTED for reader in world.readers)
        seen.add((accepted, world.restarted, world.good))
    print(f"{worlds:,} worlds")
    # All outcomes occurred: no reader, one and both readers accept, before P frees, after it, and after a restart.
    everywhere = {(accepted, *p) for accepted in range(3) for p in ((False, True), (False, False), (True, False))}
    assert seen == everywhere


@pytest.mark.parametrize(
    ("what", "rules", "table", "generations"),
    [
        ("a reader asks before it reads", Rules(ask_after_read=False), LeaseTable, True),
        ("P frees while a lease runs", Rules(free_after_end=False), LeaseTable, True),
        ("P extends a lease whose blocks it has freed", HONEST, FreesWithoutEnding, True),
        ("a restarted P does not know its requests from older ones", HONEST, LeaseTable, False),
    ],
)
def test_a_wrong_protocol_is_found(
    make: MakeExplorer, what: str, rules: Rules, table: type[LeaseTable], generations: bool
) -> None:
    explorer = make(rules, table, generations=generations)
    found = next((explorer.path(world) for world in explorer.explore() if stale(world)), None)
    assert found is not None, what
    print(what, *found, sep="\n  ")
