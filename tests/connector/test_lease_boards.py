# SPDX-License-Identifier: Apache-2.0
"""P's lease board: everything on it is held, so a reader of the board need not ask P."""

from __future__ import annotations

import ctypes
import math
import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from kvhma.errors import TransferError
from kvhma.nixl import PreparedRead
from kvhma.vllm.holds import lease_table
from kvhma.vllm.holds.lease_boards import LeaseBoards
from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.metadata import WorkerReport
from kvhma.vllm.peers import board_reader
from kvhma.vllm.peers.board_reader import BoardMemory
from kvhma.vllm.peers.client import Client
from kvhma.vllm.wire.lease_board import (
    BOARD_BYTES,
    MARK_BYTES,
    OPENED,
    OWNER_BYTES,
    BoardFile,
    LeaseBoard,
    mark_of,
    owner_of,
)
from kvhma.vllm.wire.messages import Finish, Outcome, Renew
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey
from support.leases import Clock
from support.waiting import HANG_SECONDS, until
from support.workers import DIGEST, PAGE, PAGES, Decode, Prefill, counted

FIRST = OWNER_BYTES + MARK_BYTES
ROOM = (BOARD_BYTES - FIRST) // MARK_BYTES
KEY = b"k" * 32


@pytest.fixture(autouse=True)
def patient(request, monkeypatch):
    """D waits as long as it takes to read a board, except where a test blocks the read."""
    if not {"stuck", "clock"} & set(request.fixturenames):
        monkeypatch.setattr(board_reader, "_AT_ONCE_SECONDS", HANG_SECONDS)
        monkeypatch.setattr(board_reader, "_LATE_SECONDS", HANG_SECONDS)


@pytest.fixture
def board():
    made = LeaseBoard(KEY)
    yield made
    made.close()


def bytes_of(board):
    return board._bytes.tobytes()


def marks_on(board):
    content = bytes_of(board)
    marks = {content[at : at + MARK_BYTES] for at in range(FIRST, BOARD_BYTES, MARK_BYTES)}
    return marks - {bytes(MARK_BYTES)}


# --- P's side --------------------------------------------------------------------------------------------------

WORKER = """
import sys
from kvhma.vllm.wire.lease_board import LeaseBoard
board = LeaseBoard(b"k" * 32)
print(board.file.path, board.file.owner.hex(), flush=True)
for _ in sys.stdin:
    print(board._bytes.tobytes().hex(), flush=True)
"""


def test_a_worker_in_another_process_has_the_marks_in_its_memory():
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        path, owner = worker.stdout.readline().split()
        boards = LeaseBoards([BoardFile(path, bytes.fromhex(owner))])
        place = boards.show_mark(b"m" * MARK_BYTES)

        def seen():
            worker.stdin.write("?\n")
            worker.stdin.flush()
            return bytes.fromhex(worker.stdout.readline())

        assert seen()[OWNER_BYTES:].startswith(OPENED)
        assert b"m" * MARK_BYTES in seen()
        boards.hide_mark(place)
        assert seen()[FIRST:] == bytes(BOARD_BYTES - FIRST)
        worker.stdin.close()
    boards.show_mark(b"n" * MARK_BYTES)  # the worker has ended, which raises nothing


@pytest.mark.parametrize("what", ["no such file", "another file", "a short file", "a device", "a pipe"])
def test_a_worker_elsewhere_has_no_board(board, tmp_path, what):
    """In another container its path does not exist, or is another file. D leaves it alone, and asks P."""
    other, pipe = tmp_path / "other", tmp_path / "pipe"
    other.write_bytes(b"x" * (BOARD_BYTES if what == "another file" else 5))
    os.mkfifo(pipe)
    files = {
        "no such file": BoardFile(str(tmp_path / "none"), board.file.owner),
        "another file": BoardFile(str(other), board.file.owner),
        "a short file": BoardFile(str(other), b"x" * OWNER_BYTES),
        "a device": BoardFile("/dev/zero", bytes(OWNER_BYTES)),
        "a pipe": BoardFile(str(pipe), bytes(OWNER_BYTES)),
    }
    before = other.read_bytes()
    boards = LeaseBoards([files[what]])
    assert boards.show_mark(b"m" * MARK_BYTES) is None
    boards.hide_mark(None)
    assert other.read_bytes() == before
    assert bytes_of(board) == board.file.owner + bytes(BOARD_BYTES - OWNER_BYTES), "never opened"
    both = LeaseBoards([files[what], board.file])
    assert both.show_mark(b"m" * MARK_BYTES) is not None
    assert marks_on(board) == {b"m" * MARK_BYTES}


def test_a_board_is_opened_again(board):
    """An engine may wake up with one worker that had not slept: its earlier marks are gone."""
    for mark in (b"m" * MARK_BYTES, b"n" * MARK_BYTES):
        assert LeaseBoards([board.file]).show_mark(mark) is not None
        assert marks_on(board) == {mark}


def test_a_board_is_closed_once():
    board = LeaseBoard(KEY)
    board.close()
    number = os.open("/dev/null", os.O_RDONLY)  # which may reuse its number
    board.close()
    os.close(number)


def test_what_has_no_room_is_not_shown(board):
    boards = LeaseBoards([board.file])
    marks = [bytes([number % 251 + 1, number // 251]) * 8 for number in range(ROOM + 2)]
    places = [boards.show_mark(mark) for mark in marks]
    assert places[ROOM:] == [None, None]
    assert len(set(places[:ROOM])) == ROOM
    assert marks_on(board) == set(marks[:ROOM])
    boards.hide_mark(places[5])
    boards.hide_mark(places[ROOM])
    assert boards.show_mark(marks[ROOM]) == places[5]
    assert marks_on(board) == {*marks[: ROOM + 1]} - {marks[5]}


def test_all_that_a_claim_names_is_in_the_mark():
    key = LeaseKey("r", 7)
    others = [mark_of(LeaseKey("s", 7), DIGEST), mark_of(LeaseKey("r", 8), DIGEST), mark_of(key, b"e" * 16)]
    assert mark_of(key, DIGEST) not in others
    assert len({*others, mark_of(key, DIGEST)}) == 4
    # A request may have any name, even a text that no encoding includes.
    assert mark_of(LeaseKey("\ud800", 7), DIGEST) != mark_of(LeaseKey("\ud801", 7), DIGEST)


@pytest.mark.parametrize("seed", range(20))
def test_the_board_shows_what_is_held_and_nothing_else(board, monkeypatch, seed):
    """The board is right after any event, at the latest when a reader may receive its result."""
    clock = Clock()
    monkeypatch.setattr(lease_table, "time", clock)
    table = LeaseTable(30.0)
    table.show_on_boards(LeaseBoards([board.file]))
    held = {}

    def shown_is_held():
        assert marks_on(board) == {mark_of(key, DIGEST) for key in table._held}

    monkeypatch.setattr(table._has_ended, "notify", shown_is_held)
    chance = random.Random(seed)
    for step in range(300):
        what = chance.choice(["add", "add", "finish", "renew", "release", "wait", "drain", "evict", "end"])
        some = [LeaseClaim(key, chance.randrange(3), DIGEST) for key in chance.sample(sorted(held), min(2, len(held)))]
        outcome = chance.choice(list(Outcome))
        if what == "add":
            key = LeaseKey(f"r{step}", step)
            table.max_unread_blocks = chance.choice([None, 5])
            answer = chance.choice([None, 3.0])
            table.hold(key, DIGEST, [chance.randrange(100)], expendable_seconds=answer)
            held[key] = True
        elif what == "finish":
            table.check_and_release(some, [outcome] * len(some))
        elif what == "renew":
            table.renew(some)
        elif what == "release":
            table.release(some, outcome)
        elif what == "wait":
            clock.now += chance.choice([0.1, 3.0, 40.0])
        elif what == "drain":
            table.drain_ended()
        elif what == "evict":
            for claim in some:
                table.evict(claim.key)
        elif chance.random() < 0.1:
            table.end_all()
        shown_is_held()
        held = {key: True for key in held if key in table._held}
    table.end_all()
    assert marks_on(board) == set()


def test_other_boards_show_what_is_kept_from_then_on(board):
    table = LeaseTable(30.0)
    table.show_on_boards(LeaseBoards([board.file]))
    old = LeaseKey("old", 1)
    table.hold(old, DIGEST, [1])
    second = LeaseBoard(KEY)
    table.show_on_boards(LeaseBoards([second.file]))
    assert (marks_on(board), marks_on(second)) == (set(), set())
    table.hold(LeaseKey("new", 2), DIGEST, [2])
    table.end_all()
    assert (marks_on(board), marks_on(second)) == (set(), set())
    second.close()


# --- D's side --------------------------------------------------------------------------------------------------


@pytest.fixture
def unopened():
    """P whose scheduler cannot reach its worker's board."""
    made = Prefill()
    yield made
    made.close()


@pytest.fixture
def p(unopened):
    unopened.leases.show_on_boards(LeaseBoards([unopened.board.file]))
    return unopened


@pytest.fixture
def d():
    made = Decode()
    yield made
    made.worker.close()


@pytest.fixture
def asked(monkeypatch):
    """How many claims each question to P was about."""
    found = []
    send = Client.send

    def noted(self, question, **more):
        if isinstance(question, Renew | Finish):
            found.append(len(question.claims))
        send(self, question, **more)

    monkeypatch.setattr(Client, "send", noted)
    return found


def report_of(d, *names):
    """The worker's reports of loads, all of which must have succeeded."""
    received, joined = set(), WorkerReport()

    def collect():
        nonlocal joined
        some, report = d.worker.collect(idle=True)
        received.update(some)
        joined = joined.aggregate(report)

    until(lambda: received == set(names), collect)
    assert not joined.failures
    return joined


def is_verified(d, p, name="r", remote=None):
    """Load a page; return whether P's board has shown that P held it."""
    d.start(**{name: (remote or p.remote(name, [2]), [5])})
    return report_of(d, name).verified_by_board == {name}


def test_what_the_board_shows_is_not_asked(p, d, asked):
    d.start(first=(p.remote("first", [1]), [1]))
    d.ended("first")
    d.start(a=(p.remote("a", [2, 3]), [5, 6]), b=(p.remote("b", [9]), [9]))
    assert report_of(d, "a", "b").verified_by_board == {"a", "b"}
    assert not asked
    assert counted(d, "load_seconds", 3).data["lease_checks"] == {"board": 3}
    assert np.array_equal(d.pages([5, 6, 9]), p.memory.reshape(PAGES, PAGE)[[2, 3, 9]])


def has_all_places(d):
    """Whether all memory for boards is free; memory that is still read is released afterwards."""
    boards = d.worker._engines._boards
    for one in boards._to_close:
        until(lambda one=one: not one.in_flight)
    return len(boards._free) + len(boards._to_close) == 16


def test_a_board_that_nobody_opened_is_read_once(unopened, d, asked, monkeypatch):
    """P's scheduler cannot reach its worker's memory: no mark there proves anything, and P is asked."""
    p, reads = unopened, []
    post = PreparedRead.post
    monkeypatch.setattr(PreparedRead, "post", lambda *a: (reads.append(a), post(*a))[1])
    for name in ("a", "b", "c"):
        remote = p.remote(name, [2])
        p.board._bytes[FIRST : FIRST + MARK_BYTES] = np.frombuffer(mark_of(remote.lease_key, DIGEST), np.uint8)
        assert not is_verified(d, p, name, remote)
    assert (len(reads), asked) == (1, [1, 1, 1])
    assert counted(d, "load_seconds", 3).data["lease_checks"] == {"question": 3}
    assert has_all_places(d)


@pytest.mark.parametrize(
    ("what", "cause"),
    [("its lease ends during the read", "expired"), ("P has not held it", "expired"), ("other parameters", "request")],
)
def test_one_of_a_step_that_is_not_on_the_board_is_asked_alone(p, d, asked, monkeypatch, what, cause):
    """D asks P, and P answers no. Of the first one the mark was there when the read began."""
    if cause == "expired":
        lost = p.remote("lost", [2], held=what != "P has not held it")
    else:
        lost = p.remote("lost", [2])._replace(digest=b"e" * 16)
    results = d.worker._results
    note = results.note_load_read
    if what == "its lease ends during the read":
        end = [LeaseClaim(lost.lease_key, 1, DIGEST)], Outcome.READ
        monkeypatch.setattr(results, "note_load_read", lambda: (note(), p.leases.release(*end)))
    d.start(a=(p.remote("a", [1]), [1]), lost=(lost, [2]), b=(p.remote("b", [3]), [3]))
    assert d.ended("a", "lost", "b") == {"lost": cause}
    assert asked == [1]


def test_more_leases_than_the_board_has_room_for(p, d, asked):
    for number in range(ROOM):
        p.remote(f"other {number}", [1])
    assert not is_verified(d, p)
    assert asked == [1]


def looked_at(d, p):
    """The reader of P's board that a load has made."""
    d.start(first=(p.remote("first", [1]), [1]))
    d.ended("first")
    (engine,) = d.worker._engines._engines.values()
    (board,) = engine.boards
    return board


def test_a_board_that_is_lost_with_p_says_nothing(p, d):
    board = looked_at(d, p)
    shown_at, shown = board.look(now := time.monotonic())
    assert shown_at > now
    assert shown[OWNER_BYTES:].startswith(OPENED)
    d.worker._agent.disconnect(board._read.peer)
    assert board.look(time.monotonic()) == (math.inf, b"")
    board.close()
    board.close()
    free = d.worker._engines._boards._free
    assert sorted(free) == list(range(16)), "each once"


@pytest.fixture
def second(d, monkeypatch):
    """A second worker, which D counts as a worker of the same engine."""
    made = Prefill()
    boards_of = d.worker._engines._boards_of

    def of_both(peers):
        return boards_of([None, *peers, d.worker._agent.connect(made.hellos[0, 0][0])])

    monkeypatch.setattr(d.worker._engines, "_boards_of", of_both)
    yield made
    made.close()


def test_a_board_speaks_for_its_own_worker_only(p, d, asked, second):
    """An untrusted peer repeats another engine worker's identity beside its own, and writes its own board."""
    second.leases.show_on_boards(LeaseBoards([second.board.file]))
    assert not is_verified(d, p)
    assert asked == [1]
    remote = p.remote("s", [3])
    second.leases.hold(remote.lease_key, DIGEST, [3])
    assert is_verified(d, p, "s", remote), "what both show is held"
    assert asked == [1]


def test_an_engine_of_which_one_worker_has_no_board_is_asked(p, d, asked, second):
    """One worker may run on another host than its scheduler."""
    assert not is_verified(d, p)
    assert asked == [1]
    assert has_all_places(d)


# --- a slow read -------------------------------------------------------------------------------------------------


class SlowRead:
    """A prepared read that ends when the test ends it."""

    peer = SimpleNamespace(name="p", payload=SimpleNamespace(public_key=KEY))

    def __init__(self, address):
        self.address = address
        self.posted = 0
        self.finished = True
        self.released = 0

    def post(self):
        self.posted += 1
        self.finished = False
        return self

    def end(self, content=b""):
        board = owner_of(KEY) + OPENED + content
        ctypes.memmove(self.address, board, len(board))
        self.finished = True

    def wait(self, seconds):
        return self.finished

    def poll(self):
        return "done" if self.finished else "running"

    def drive(self):
        return self.finished

    def release(self):
        self.released += 1


class SlowAgent:
    """An agent whose reads are slow."""

    def __init__(self):
        self.registered = 0
        self.reads = []
        self.memory = BoardMemory(self)

    def register(self, geometry):
        self.registered += 1

    def prepare_read(self, peer, local, remote):
        self.reads.append(SlowRead(int(local[0, 0])))
        return self.reads[-1]


def slow_board():
    """A reader of a board, and its read."""
    agent = SlowAgent()
    return agent.memory.reader(None, 1), agent.reads[0]


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(board_reader, "time", made)
    return made


def test_a_reading_that_began_before_the_read_had_ended_does_not_count(clock):
    reader, read = slow_board()
    assert reader.look(999.0) == (0.0, b"")
    clock.now = 1000.002
    assert reader.look(1000.001) == (0.0, b"")
    assert read.posted == 1, "one at a time"
    read.end(b"first")
    shown_at, board = reader.look(1000.001)
    assert shown_at == 1000.0, "that is before a read which ended at 1000.001, and after one of 999"
    assert b"first" in board
    assert read.posted == 2
    read.end(b"again")
    shown_at, board = reader.look(1000.001)
    assert shown_at == 1000.002
    assert b"again" in board
    assert read.posted == 2, "what is known is not read again"


def test_a_board_that_does_not_answer_keeps_later_loads_no_time(clock):
    reader, read = slow_board()
    assert reader.look(1.0) == (0.0, b"")
    clock.now += 0.02
    assert reader.look(1.0) == (math.inf, b""), "P is asked"
    clock.now += 60.0
    assert reader.look(clock.now) == (math.inf, b""), "at once"
    assert read.posted == 1
    read.end()
    assert reader.look(1.0)[0] == 1000.0, "until it has answered"
    assert reader.useful


def test_a_place_that_may_still_be_written_to_is_not_given_back():
    agent = SlowAgent()
    memory = agent.memory
    readers = [memory.reader(None, 1) for _ in range(17)]
    assert agent.registered == 2
    readers[0].look(time.monotonic())
    for reader in readers:
        reader.close()
        reader.close()
    assert [read.released for read in agent.reads] == [0] + [1] * 16
    assert readers[0]._place not in memory._free
    memory.reader(None, 1).close()
    assert readers[0]._place is not None, "it is read still"
    agent.reads[0].end()
    memory.reader(None, 1).close()
    assert agent.reads[0].released == 1, "no second close"
    readers[0].close()
    assert sorted(memory._free) == list(range(32))
    assert readers[1].look(time.monotonic()) == (math.inf, b""), "and nothing is read into it any more"
    assert agent.reads[1].posted == 0


def test_a_board_that_becomes_another_workers_says_nothing(p, d):
    board = looked_at(d, p)
    assert board.look(time.monotonic())[1][OWNER_BYTES:].startswith(OPENED)
    p.board._bytes[0] ^= 1
    assert board.look(time.monotonic()) == (math.inf, b"")
    assert not board.useful


@pytest.fixture
def stuck(p, d, monkeypatch):
    """P's board, whose read does not end before the test ends it."""
    board = looked_at(d, p)
    transfers, states = board._read._in_flight._session.open(), []
    for name in ("transfer", "check_xfer_state"):
        real = getattr(transfers, name)

        def held(handle, real=real):
            state = real(handle)
            return "PROC" if handle is board._read._handle and not states else state

        monkeypatch.setattr(transfers, name, held)
    yield board, states
    states.append("ended")


def test_p_is_asked_if_its_board_takes_too_long(p, d, asked, stuck):
    for name, seconds in (("a", board_reader._LATE_SECONDS), ("b", 0)):
        began = time.monotonic()
        assert not is_verified(d, p, name)
        assert time.monotonic() - began >= seconds
    assert asked == [1, 1]


def test_an_engine_does_not_sleep_while_a_board_is_read(p, d, stuck):
    """It would stop its threads, and then find that a read still writes to its memory."""
    board, states = stuck
    board.look(time.monotonic())
    with pytest.raises(TransferError, match="1 reads have not ended"):
        d.worker.close(idle=True)
    d.start(after=(p.remote("after", [3]), [4]))
    report_of(d, "after")
    states.append("ended")
    d.worker.close(idle=True)


def test_a_lost_engine_whose_board_is_read_keeps_nobody_waiting(p, d, stuck):
    board, states = stuck
    board.look(time.monotonic())
    engines = d.worker._engines
    (engine,) = engines._engines.values()
    engines._note_acquired(engine)
    engine.peers[0].gone = "lost"
    engines.release_engine(engine)
    assert board._place is not None, "something may be written there"
    states.append("ended")
    until(lambda: board._place is None)
