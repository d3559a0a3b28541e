# SPDX-License-Identifier: Apache-2.0
"""P's lease table: what it holds, for whom and how long; on a clock of the test."""

import random
import threading

import pytest

from kvhma.vllm.holds import lease_table
from kvhma.vllm.holds.lease_table import OVERDUE_SECONDS, LeaseEnd, LeaseTable, LeaseUsage
from kvhma.vllm.wire.messages import LeaseState, Outcome
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey
from support.leases import Clock, ended

HELD, ENDED, OTHER, FULL = LeaseState.HELD, LeaseState.ENDED, LeaseState.OTHER, LeaseState.FULL
LEASE = 30.0
GENERATION = iter(range(1, 1 << 20))


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


def add(table, name, blocks=(), seconds=None):
    key = LeaseKey(name, next(GENERATION))
    table.hold(key, digest_of(key), blocks, expendable_seconds=seconds)
    return key


def answer(table, name, blocks=()):
    """Hold an answer for the next turn of its chat."""
    return add(table, name, blocks, seconds=480.0)


def claim(key, reader=1, digest=None):
    return LeaseClaim(key, reader, digest_of(key) if digest is None else digest)


def renew(table, key, reader=1):
    (state,) = table.renew([claim(key, reader)])
    return state


# Each request has a lease of 30 s, or is a kept turn of 480 s. `wait` passes seconds; `claim` and `refused` renew for
# some readers; `read`, `shared` and `unread` release them; `asks` reads and releases with one question. `over` takes
# what has ended, and says why.
STORIES = {
    "a lease ends": "wait 29.99, over, wait .02, over, wait 1, over UNCLAIMED, over, refused 1",
    "a renewal extends it": "wait 29, claim 1, over, wait 29, claim 1, over, wait 29, claim 1, over, wait 29.9, over",
    "a reader that renews for ever holds it for ever": ", ".join(["claim 1, wait 29, over"] * 1000),
    "a release is reported once": "read 1 1, read 1, refused 1, over READ, over",
    "readers share a request": "claim 1 2 3, read 2, over, read 1, over, claim 3, read 3, over READ",
    "a reader releases with its question": "claim 1, asks 2, over, asks 1, over READ",
    "a reader that fails leaves it to the next": "claim 1, unread 1, over, claim 2, read 2, over READ",
    "a reader that fails after another has read is the last": "claim 1 2, read 1, unread 2, over READ",
    "no reader could read it": "claim 1, unread 1, wait 30, over, wait 1, over UNREAD",
    # 153 loads of a run on an overloaded machine ended as `expired`, and no log named the cause.
    "claimed and not renewed": "claim 1, wait 30, over, wait 1, over NOT_RENEWED",
    "a reader dies after another has read": "claim 1, wait 25, claim 2, read 2, over, wait 5, over, wait 1, over READ",
    "a late reader is in time": "claim 1, shared 1, over, claim 2, wait 2.1, over, read 2, over READ, refused 2",
    "a late reader is too late": "claim 1, shared 1, wait 1.9, over, wait .1, over READ, refused 2",
    "time for late readers ends with the lease": "wait 29, shared 1, over, wait 1, over READ",
    # P was stopped for longer than a lease. Its next step ran before its listener read the renewals that had arrived
    # in time.
    "renewals wait while P is stopped": "claim 1, wait 300, over, claim 1, wait 29, over",
    "a renewal before the next step": "claim 1, wait 31, claim 1, over",
    "a turn is held for longer": "turn, wait 479.9, over, wait .1, over, wait 1, over UNCLAIMED",
    "a reader of a turn shortens nothing": "turn, claim 1, unread 1, wait 479, over, claim 1, wait 29, over, asks 1, "
    "over READ, refused 1",
}


@pytest.mark.parametrize("events", STORIES.values(), ids=STORIES)
def test_stories_of_a_lease(table, clock, events):
    key = answer(table, "a") if events.startswith("turn, ") else add(table, "a")
    outcomes = {"read": Outcome.READ, "shared": Outcome.READ_SHARED, "unread": Outcome.UNREAD}
    for event in events.removeprefix("turn, ").split(", "):
        what, *values = event.split()
        if what == "wait":
            clock.pass_by(float(values[0]))
        elif what == "over":
            assert ended(table) == {LeaseEnd[why]: ["a"] for why in values}, event
        elif what in outcomes:
            table.release([claim(key, int(reader)) for reader in values], outcomes[what])
        else:
            claims = [claim(key, int(reader)) for reader in values]
            states = table.check_and_release(claims, [Outcome.READ]) if what == "asks" else table.renew(claims)
            assert set(states) == {ENDED if what == "refused" else HELD}, event


def test_an_old_generation_holds_nothing(table):
    old = add(table, "a")
    table.release([claim(old)], Outcome.READ)
    new = add(table, "a")
    assert table.renew([claim(old), claim(new)]) == [ENDED, HELD]
    table.release([claim(old)], Outcome.READ)
    assert ended(table) == {LeaseEnd.READ: ["a"]}
    assert len(table) == 1


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
    assert claimed


# --- only readers that have the parameters ----------------------------------------------------------------------


def test_a_claim_of_other_parameters_is_not_of_this_request(table, clock):
    """A client with parameters of a request can put another request's blocks into them, and recompute the digest if
    there is no secret. P must not confirm that it holds them."""
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
    assert ended(table) == {}
    clock.pass_by(OVERDUE_SECONDS)
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
        assert table.usage().blocks == len({block for one in held for block in one.ids.tolist()})
        assert table._without_reader.used == len({b for one in held if not one.readers for b in one.ids.tolist()})
        assert table._without_reader.used <= 60 + 11 or what >= 0.3
    seen += sum(map(len, table.drain_ended().values()))
    assert seen + len(table) == len(keys), "each request ends once"
    clock.pass_by(10 * LEASE)
    table.drain_ended()
    clock.pass_by(OVERDUE_SECONDS)
    table.drain_ended()
    assert table.usage() == LeaseUsage(0, 0, 0.0)


def test_how_long_the_oldest_unread_one_has_waited(table, clock):
    answer(table, "which may never be read")
    clock.pass_by(5)
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


def test_answers_go_before_prompts(table):
    table.max_unread_blocks = 10
    add(table, "p1", range(4))
    answer(table, "a1", range(10, 14))
    add(table, "p2", range(20, 24))
    assert ended(table) == {LeaseEnd.EVICTED: ["a1"]}
    answer(table, "a2", range(30, 34))
    assert ended(table) == {LeaseEnd.EVICTED: ["p1"]}, "what has just finished stays"


def test_an_answer_may_be_given_up_while_it_is_read(table):
    keys = [answer(table, name, [index]) for index, name in enumerate("abc")]
    add(table, "p", [9])
    renew(table, keys[0])
    assert [key.request_id for key, _ in table.expendable()] == ["b", "c", "a"]
    assert table.usage().expendable == 3
    for key, _ in table.expendable():
        table.evict(key)
        table.evict(key)
    assert ended(table) == {LeaseEnd.EVICTED: ["b", "c", "a"]}
    assert table.check_and_release([claim(keys[0])], [Outcome.READ]) == [ENDED]
    assert table.usage() == LeaseUsage(1, 1, 0.0)


def test_waiting_ends_with_a_lease(table):
    table.wait_for_end(20)  # nothing is kept
    key = add(table, "a")
    table.wait_for_end(0)
    reader = threading.Timer(0.05, lambda: table.check_and_release([claim(key)], [Outcome.READ]))
    reader.start()
    table.wait_for_end(20)
    assert ended(table) == {LeaseEnd.READ: ["a"]}
    reader.join()
