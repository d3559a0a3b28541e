# SPDX-License-Identifier: Apache-2.0
"""P's lease table: what it holds, for whom and how long; on a clock of the test."""

import random
import threading

import pytest

from kvhma.vllm.holds import lease_table
from kvhma.vllm.holds.lease_table import LATE_READER_SECONDS, OVERDUE_SECONDS, LeaseEnd, LeaseTable, LeaseUsage
from kvhma.vllm.wire.messages import LeaseState, Outcome
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey
from support.leases import ended

HELD, ENDED, OTHER, FULL = LeaseState.HELD, LeaseState.ENDED, LeaseState.OTHER, LeaseState.FULL
LEASE = 30.0
GENERATION = iter(range(1, 1 << 20))


class Clock:
    """P's monotonic clock."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(lease_table, "time", made)
    return made


@pytest.fixture
def table(clock):
    return LeaseTable(LEASE)


def digest_of(key):
    return key.request_id.encode().ljust(16, b".")[:16]


def add(table, name, blocks=()):
    key = LeaseKey(name, next(GENERATION))
    table.hold(key, digest_of(key), blocks)
    return key


def claim(key, reader=1, digest=None):
    return LeaseClaim(key, reader, digest_of(key) if digest is None else digest)


def renew(table, key, reader=1):
    (state,) = table.renew([claim(key, reader)])
    return state


def pass_overdue(table, clock):
    """Let the time pass in which an expired lease may still be renewed."""
    assert ended(table) == {}
    clock.pass_by(OVERDUE_SECONDS)


def test_a_lease_ends(table, clock):
    key = add(table, "a")
    clock.pass_by(LEASE - 0.01)
    assert ended(table) == {}
    clock.pass_by(0.02)
    pass_overdue(table, clock)
    assert ended(table) == {LeaseEnd.UNCLAIMED: ["a"]}
    assert ended(table) == {}
    assert renew(table, key) is ENDED


def test_a_renewal_extends_it(table, clock):
    key = add(table, "a")
    for _ in range(5):
        clock.pass_by(LEASE - 1)
        assert renew(table, key) is HELD
        assert ended(table) == {}


def test_a_release_is_reported_once(table):
    key = add(table, "a")
    table.release([claim(key), claim(key), claim(LeaseKey("b", 1))], Outcome.READ)
    assert renew(table, key) is ENDED
    assert ended(table) == {LeaseEnd.READ: ["a"]}
    assert ended(table) == {}


def test_an_old_generation_holds_nothing(table):
    old = add(table, "a")
    table.release([claim(old)], Outcome.READ)
    new = add(table, "a")
    assert table.renew([claim(old), claim(new)]) == [ENDED, HELD]
    table.release([claim(old)], Outcome.READ)
    assert ended(table) == {LeaseEnd.READ: ["a"]}
    assert len(table) == 1


def test_readers_share_a_request(table):
    """Formerly the first reader had it alone: of three samples with the same parameters two lost their blocks."""
    key = add(table, "a")
    assert table.renew([claim(key, reader) for reader in (1, 2, 3)]) == [HELD] * 3
    for reader in (2, 1):
        table.release([claim(key, reader)], Outcome.READ)
        assert len(table) == 1
    assert renew(table, key, 3) is HELD
    table.release([claim(key, 3)], Outcome.READ)
    assert ended(table) == {LeaseEnd.READ: ["a"]}


def test_a_reader_that_fails_leaves_the_request_to_the_next(table):
    """Formerly any release freed the blocks, so that the next decode engine found no blocks."""
    key = add(table, "a")
    renew(table, key, 1)
    table.release([claim(key, 1)], Outcome.UNREAD)
    assert ended(table) == {}
    assert renew(table, key, 2) is HELD
    table.release([claim(key, 2)], Outcome.READ)
    assert ended(table) == {LeaseEnd.READ: ["a"]}


def test_one_that_fails_after_another_has_read_is_the_last(table):
    key = add(table, "a")
    table.renew([claim(key, 1), claim(key, 2)])
    table.release([claim(key, 1)], Outcome.READ)
    table.release([claim(key, 2)], Outcome.UNREAD)
    assert ended(table) == {LeaseEnd.READ: ["a"]}


def test_a_lease_that_nobody_could_read_under_ends_as_unread(table, clock):
    key = add(table, "a")
    renew(table, key)
    table.release([claim(key)], Outcome.UNREAD)
    clock.pass_by(LEASE)
    pass_overdue(table, clock)
    assert ended(table) == {LeaseEnd.UNREAD: ["a"]}


def test_a_lease_that_is_claimed_and_not_renewed_says_so(table, clock):
    """153 loads of a run on an overloaded machine ended as `expired`, and no log named the cause."""
    key = add(table, "a")
    renew(table, key)
    clock.pass_by(LEASE)
    pass_overdue(table, clock)
    assert ended(table) == {LeaseEnd.NOT_RENEWED: ["a"]}


def test_a_reader_that_dies_keeps_the_blocks_for_its_lease_only(table, clock):
    key = add(table, "a")
    renew(table, key, 1)
    clock.pass_by(LEASE - 5)
    renew(table, key, 2)
    table.release([claim(key, 2)], Outcome.READ)
    assert ended(table) == {}
    clock.pass_by(5)
    pass_overdue(table, clock)
    assert ended(table) == {LeaseEnd.READ: ["a"]}, "read, so no lease that ended unread"


def test_readers_that_have_not_claimed_yet_have_a_moment(table, clock):
    for name in ("in time", "late"):
        key = add(table, name)
        renew(table, key, 1)
        table.release([claim(key, 1)], Outcome.READ_SHARED)
        assert ended(table) == {}
        if name == "in time":
            assert renew(table, key, 2) is HELD
            clock.pass_by(LATE_READER_SECONDS + 0.1)
            assert ended(table) == {}, "a claim outlasts the moment"
            table.release([claim(key, 2)], Outcome.READ)
        else:
            clock.pass_by(LATE_READER_SECONDS)
        assert ended(table) == {LeaseEnd.READ: [name]}
        assert renew(table, key, 2) is ENDED


def test_that_moment_does_not_outlast_the_lease(table, clock):
    key = add(table, "a")
    clock.pass_by(LEASE - 1)
    table.release([claim(key, 1)], Outcome.READ_SHARED)
    clock.pass_by(1)
    assert ended(table) == {LeaseEnd.READ: ["a"]}


# --- P itself is late ------------------------------------------------------------------------------------------


def test_renewals_that_waited_while_p_stood_still_count(table, clock):
    """P was stopped for longer than a lease. Its next step ran before its listener read the renewals that had arrived
    in time. Formerly P freed the blocks, and answered the reader, rightly, that they were not held."""
    key = add(table, "a")
    renew(table, key)
    clock.pass_by(10 * LEASE)
    assert ended(table) == {}, "a step comes first"
    assert renew(table, key) is HELD, "then what had arrived"
    clock.pass_by(LEASE - 1)
    assert ended(table) == {}


def test_a_renewal_that_comes_before_the_next_step_counts(table, clock):
    """Formerly a renewal of an expired lease was refused, although the blocks were still held."""
    key = add(table, "a")
    renew(table, key)
    clock.pass_by(LEASE + 1)
    assert renew(table, key) is HELD
    assert ended(table) == {}


def test_who_is_told_held_has_been_so_all_the_time(table, clock):
    """The meaning of `held` after a read: between any claim and a later `held` P never freed the blocks."""
    rng = random.Random(7)
    keys = [add(table, f"{at}") for at in range(40)]
    given_back = set()
    claimed = set()
    for _ in range(4000):
        clock.pass_by(rng.random() * LEASE / 4)
        key, reader = rng.choice(keys), rng.randrange(3)
        what = rng.random()
        if what < 0.5:
            state = renew(table, key, reader)
            assert (state is HELD) == (key.request_id not in given_back)
            claimed.add(key)
        elif what < 0.6:
            table.release([claim(key, reader)], rng.choice(list(Outcome)))
            if len(table) == 0:
                break
        for names in ended(table).values():
            given_back.update(names)
        # A request that a release ended is gone before the next step reports it.
        given_back.update(key.request_id for key in keys if key not in table._held)
    assert claimed


# --- only readers that have the parameters ----------------------------------------------------------------------


def test_a_claim_of_other_parameters_is_not_of_this_request(table, clock):
    """Formerly the table knew a request and its readers, but not the parameters that it had handed out.

    An attacker with parameters of a request could put another request's blocks into them, and recompute the digest,
    which has no secret. P confirmed that it held them, and a decode engine continued another tenant's prompt.
    """
    mine = add(table, "mine")
    forged = b"of other blocks!"
    assert table.renew([claim(mine, 1, forged), claim(mine, 2)]) == [OTHER, HELD]
    assert table.take_digests_refused() == 1
    assert table.take_digests_refused() == 0
    table.release([claim(mine, 2, forged)], Outcome.READ)
    assert ended(table) == {}, "nor can it be released"
    assert table.take_digests_refused() == 1
    clock.pass_by(LEASE)
    table.renew([claim(mine, 1, forged)])
    pass_overdue(table, clock)
    table.renew([claim(mine, 1, forged)])
    assert ended(table) == {LeaseEnd.NOT_RENEWED: ["mine"]}, "nor renewed"


def test_readers_have_a_bound(table, clock):
    key = add(table, "a")
    most = lease_table.MAX_READERS
    assert table.renew([claim(key, reader) for reader in range(most + 1)]) == [HELD] * most + [FULL]
    assert renew(table, key, 0) is HELD, "those that are known may stay"
    clock.pass_by(LEASE - 1)
    renew(table, key, 0)
    clock.pass_by(2)
    assert renew(table, key, most) is HELD, "those that are silent make room"


def test_the_bound_on_readers_keeps_nobody_out_by_guessing(table):
    """The name of a request is not enough (clients choose names): a reader needs its generation and its digest, too."""
    key = add(table, "a")
    guessed = [LeaseKey("a", key.generation ^ (1 << bit)) for bit in range(64)]
    assert set(table.renew([LeaseClaim(guess, 1, digest_of(key)) for guess in guessed])) == {ENDED}
    forged = [claim(key, reader, bytes(16)) for reader in range(2 * lease_table.MAX_READERS)]
    assert set(table.renew(forged)) == {OTHER}
    assert renew(table, key, 7) is HELD


# --- how many blocks may be kept --------------------------------------------------------------------------------


def test_unread_requests_have_a_share_of_the_blocks(table):
    """20 unread requests held 95 % of P's blocks for as long as their lease: P could serve no other client."""
    table.max_unread_blocks = 50
    keys = [add(table, f"{at}", range(10 * at, 10 * at + 10)) for at in range(20)]
    assert table.usage().blocks == 50
    assert ended(table) == {LeaseEnd.EVICTED: [f"{at}" for at in range(15)]}, "the oldest go first"
    assert table.renew([claim(key) for key in keys[13:17]]) == [ENDED, ENDED, HELD, HELD]


def test_what_is_being_read_stays_and_does_not_count(table):
    """Decode engines that are slower than P make it wait. That is no attack, and costs only time."""
    table.max_unread_blocks = 50
    read = [add(table, f"read {at}", range(10 * at, 10 * at + 10)) for at in range(5)]
    assert {renew(table, key) for key in read} == {HELD}
    for at in range(10):
        add(table, f"unread {at}", range(100 + 10 * at, 110 + 10 * at))
    assert table.usage().blocks == 100
    assert {renew(table, key) for key in read} == {HELD}
    table.release([claim(read[0])], Outcome.UNREAD)
    add(table, "one more", range(200, 210))
    assert renew(table, read[0]) is ENDED, "without a reader, it is the oldest one"
    assert renew(table, read[1]) is HELD


def test_one_request_may_always_be_kept(table):
    """Otherwise P could never hand off a prompt that is longer than the share."""
    table.max_unread_blocks = 50
    small = add(table, "small", range(10))
    large = add(table, "large", range(100, 180))
    assert (renew(table, small), table.usage().blocks) == (ENDED, 80)
    assert renew(table, large) is HELD
    again = [add(table, f"large {at}", range(200, 280)) for at in range(2)]
    assert [renew(table, key) for key in again] == [HELD, HELD], "the same blocks: there is nothing to be gained"


def test_blocks_of_a_shared_prefix_count_once(table):
    table.max_unread_blocks = 50
    keys = [add(table, f"{at}", [*range(40), 100 + at]) for at in range(10)]
    assert table.usage() == LeaseUsage(10, 50, 0)
    assert ended(table) == {}
    add(table, "more", [*range(40), 200])
    assert ended(table) == {LeaseEnd.EVICTED: ["0"]}
    renew(table, keys[5])
    assert table.usage().blocks == 50
    for at in range(6):
        add(table, f"other {at}", [300 + at])
    # 40 shared, 7 of those that are left without a reader, ...
    assert table.usage().blocks <= 51


def test_one_that_was_read_and_waits_for_late_readers_may_go(table):
    table.max_unread_blocks = 10
    key = add(table, "a", range(10))
    renew(table, key)
    table.release([claim(key)], Outcome.READ_SHARED)
    add(table, "b", range(10, 20))
    assert ended(table) == {LeaseEnd.READ: ["a"]}, "it was read, so it is not counted as evicted"


@pytest.mark.parametrize("what", ["renews", "finishes"])
def test_readers_that_are_gone_are_counted_off_once(table, clock, what):
    """Formerly their blocks were subtracted again when one more reader needed their room, and then not for a later
    request."""
    table.max_unread_blocks = 10
    most = lease_table.MAX_READERS
    key = add(table, "a", range(10))
    assert table.renew([claim(key, reader) for reader in range(most)]) == [HELD] * most
    clock.pass_by(LEASE)
    new = claim(key, most)
    assert (table.renew([new]) if what == "renews" else table.check_and_release([new], [Outcome.READ])) == [HELD]
    table.release([new], Outcome.READ)
    assert ended(table) == {LeaseEnd.READ: ["a"]}
    add(table, "b", range(10))
    add(table, "c", range(10, 20))
    assert ended(table) == {LeaseEnd.EVICTED: ["b"]}


def test_without_vllms_manager_there_is_no_bound(table):
    for at in range(20):
        add(table, f"{at}", range(10 * at, 10 * at + 10))
    assert (len(table), table.usage().blocks) == (20, 200)


def test_what_is_kept_adds_up_whatever_happens(table, clock):
    """Compares the counts with a new count of all requests, after each of many random events."""
    rng = random.Random(3)
    table.max_unread_blocks = 60
    keys = []
    seen = 0
    for at in range(800):
        clock.pass_by(rng.random() * 2)
        what = rng.random()
        if what < 0.3 or not keys:
            blocks = rng.sample(range(100), rng.randrange(12))
            keys.append(add(table, f"{at}", blocks))
        elif what < 0.7:
            renew(table, rng.choice(keys[-20:]), rng.randrange(3))
        elif what < 0.8:
            table.check_and_release([claim(rng.choice(keys[-20:]), rng.randrange(3))], [rng.choice(list(Outcome))])
        elif what < 0.95:
            table.release([claim(rng.choice(keys[-20:]), rng.randrange(3))], rng.choice(list(Outcome)))
        else:
            seen += sum(map(len, table.drain_ended().values()))
        held = table._held.values()
        assert table.usage().blocks == len({block for one in held for block in one.blocks.tolist()})
        assert table._without_reader.used == len({b for one in held if not one.readers for b in one.blocks.tolist()})
        assert table._without_reader.used <= 60 + 11 or what >= 0.3
    seen += sum(map(len, table.drain_ended().values()))
    assert seen + len(table) == len(keys), "each request ends once"
    clock.pass_by(10 * LEASE)
    table.drain_ended()
    clock.pass_by(OVERDUE_SECONDS)
    table.drain_ended()
    assert table.usage() == LeaseUsage(0, 0, 0.0)


def test_how_long_the_oldest_unread_one_has_waited(table, clock):
    assert table.usage().oldest_unread_seconds == 0
    first = add(table, "first")
    clock.pass_by(3)
    second = add(table, "second")
    clock.pass_by(4)
    assert table.usage().oldest_unread_seconds == 7
    renew(table, first)
    assert table.usage().oldest_unread_seconds == 4
    table.release([claim(second)], Outcome.READ_SHARED)
    assert table.usage().oldest_unread_seconds == 0
    table.release([claim(first)], Outcome.UNREAD)
    assert table.usage().oldest_unread_seconds == 7


def test_several_threads_at_once():
    """The listener renews and releases while the scheduler adds and drains."""
    table = LeaseTable(LEASE)
    table.max_unread_blocks = 200
    keys = [LeaseKey(f"{at}", at) for at in range(400)]
    errors = []

    def answer():
        try:
            for key in keys:
                table.renew([claim(key)])
                table.release([claim(key)], Outcome.READ)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=answer) for _ in range(4)]
    for thread in threads:
        thread.start()
    reported = []
    for key in keys:
        table.hold(key, digest_of(key), [key.generation % 50, 50 + key.generation])
        reported += [name for names in ended(table).values() for name in names]
    for thread in threads:
        thread.join()
    table.release([claim(key) for key in keys], Outcome.READ)
    reported += [name for names in ended(table).values() for name in names]
    assert errors == []
    assert sorted(reported, key=int) == [key.request_id for key in keys]
    assert table.usage() == LeaseUsage(0, 0, 0.0)


# --- answers, for the next turns of their conversations ----------------------------------------------------------


def answer(table, name, blocks=(), seconds=480.0):
    key = LeaseKey(name, next(GENERATION))
    table.hold(key, digest_of(key), blocks, turn_seconds=seconds)
    return key


def test_an_answer_is_kept_for_a_time_of_its_own(table, clock):
    answer(table, "a")
    add(table, "b")
    clock.pass_by(LEASE + 1)
    pass_overdue(table, clock)
    assert ended(table) == {LeaseEnd.UNCLAIMED: ["b"]}
    clock.pass_by(480 - LEASE)
    pass_overdue(table, clock)
    assert ended(table) == {LeaseEnd.KEPT_TURN_EXPIRED: ["a"]}


def test_a_reader_of_an_answer_shortens_nothing(table, clock):
    key = answer(table, "a")
    assert renew(table, key) is HELD
    table.release([claim(key)], Outcome.UNREAD)
    clock.pass_by(479)
    assert ended(table) == {}
    assert renew(table, key) is HELD
    clock.pass_by(LEASE - 1)
    assert ended(table) == {}, "and may take a lease from then on"
    assert table.check_and_release([claim(key)], [Outcome.READ]) == [HELD]
    assert ended(table) == {LeaseEnd.KEPT_TURN_READ: ["a"]}
    assert renew(table, key) is ENDED


def test_answers_go_before_prompts(table):
    table.max_unread_blocks = 10
    add(table, "p1", range(4))
    answer(table, "a1", range(10, 14))
    add(table, "p2", range(20, 24))
    assert ended(table) == {LeaseEnd.KEPT_TURN_EVICTED: ["a1"]}
    answer(table, "a2", range(30, 34))
    assert ended(table) == {LeaseEnd.EVICTED: ["p1"]}, "what has just finished stays"


def test_an_answer_may_be_given_up_while_it_is_read(table):
    keys = [answer(table, name, [index]) for index, name in enumerate("abc")]
    add(table, "p", [9])
    renew(table, keys[0])
    assert [key.request_id for key, _ in table.kept_turns()] == ["b", "c", "a"]
    assert table.usage().kept_turns == 3
    for key, _ in table.kept_turns():
        table.evict(key)
        table.evict(key)
    assert ended(table) == {LeaseEnd.KEPT_TURN_EVICTED: ["b", "c", "a"]}
    assert table.check_and_release([claim(keys[0])], [Outcome.READ]) == [ENDED]
    assert table.usage() == LeaseUsage(1, 1, 0.0)


def test_how_long_answers_wait_is_nobodys_concern(table, clock):
    answer(table, "a")
    clock.pass_by(5)
    assert table.usage().oldest_unread_seconds == 0


def test_waiting_ends_with_a_lease(table):
    table.wait_for_end(20)  # nothing is kept
    key = add(table, "a")
    table.wait_for_end(0)
    reader = threading.Timer(0.05, lambda: table.check_and_release([claim(key)], [Outcome.READ]))
    reader.start()
    table.wait_for_end(20)
    assert ended(table) == {LeaseEnd.READ: ["a"]}
    reader.join()
