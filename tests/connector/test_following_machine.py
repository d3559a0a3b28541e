# SPDX-License-Identifier: Apache-2.0
"""Tickets as a state machine: steps, preemptions, reads, lost connections and ends in any order, with labelled blocks.

P writes a block when a step runs, and overwrites it as soon as a rule allows. D reads each block at some moment between
the order and the report. Beside P's connector another one may fill the first blocks within a step, or fail, so that P
computes them after all. In every case D counts a token as loaded only if P has computed it.
"""

import contextlib
import random
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

from kvhma.vllm.metadata import WorkerReport
from kvhma.vllm.options.tickets import following
from support.schedulers import STEP, manager, number_of, output, report_of, request, scheduler
from support.tries import RUNS

SIZE = 16
BLOCKS = 12
N = BLOCKS * SIZE - 5
MOST_CUTS = 4


class Machine:
    """P, D, their blocks, and a source of randomness."""

    def __init__(self, seed):
        self.rng = random.Random(f"following {seed}")
        self.piece_tokens = SIZE * self.rng.randrange(1, 4)
        self.p, self.d = scheduler(), scheduler(ranks=1)
        self.ticket = f"{seed:032x}"
        self.p.context.manager = manager(
            get_blocks=lambda name: SimpleNamespace(
                blocks=tuple([SimpleNamespace(block_id=one) for one in row] for row in self.tables)
            ),
        )
        self.memory = {}  # P's: block -> what each of its tokens is, None for anything else
        self.junk = set()  # blocks that other requests write at any moment
        self.tables = self.new_tables()
        self.computed = 0
        # Steps that were built: number, first token, one after the last token, blocks, token from which on it is junk
        self.flying = []
        self.held = {}  # D's blocks
        self.reading = None  # an order, and which of its blocks were read
        self.over = None
        self.done = set()

    def close(self):
        self.d.close()
        self.p.close()

    def new_tables(self):
        ids = self.rng.sample(range(1, 200), 2 * BLOCKS + 1)
        self.junk.difference_update(ids)
        return [ids[:BLOCKS], ids[BLOCKS : 2 * BLOCKS], ids[2 * BLOCKS :]]

    # --- what vLLM and the workers do at P

    def build(self, preempted=False):
        tokens = 0 if preempted else min(self.rng.choice([16, 24, 40, 64]), N - self.computed)
        first, junk = self.computed, N
        filled = tokens and not self.computed and self.rng.random() < 0.3
        if filled:  # by another connector
            self.computed = self.rng.choice([16, 32, 64])
            junk = self.rng.choice([N, N, 16 * self.rng.randrange(self.computed // 16)])
        names = {"at p": tokens} if tokens else {}
        step = self.p.on_step(
            SimpleNamespace(
                num_scheduled_tokens=names,
                total_num_scheduled_tokens=tokens,
                preempted_req_ids={"at p"} if preempted else set(),
                has_sync_kv_loads=bool(filled),
                scheduled_new_reqs=[],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=list(names), num_computed_tokens=[self.computed] * len(names)
                ),
            )
        )
        number = number_of(step)
        if preempted:
            mine = {block for table in self.tables for block in table}
            if self.rng.random() < 0.5:
                self.junk |= mine
                self.tables = self.new_tables()
            else:  # other requests had its blocks, and it gets the same blocks again
                self.memory |= {block: [-1] * SIZE for block in mine}
            self.computed = 0
            self.flying = [(one, 0, 0, [], N) for one, *_ in self.flying]  # other requests own their blocks now
        self.computed += tokens
        self.flying.append((number, first, self.computed, self.tables[0], junk))

    def results(self):
        number, first, end, table, junk = self.flying.pop(0)
        for token in range(first, end):
            self.memory.setdefault(table[token // SIZE], [None] * SIZE)[token % SIZE] = token if token < junk else -1
        if junk < end:  # vLLM retracts the tokens before it reports the step to the connector
            self.computed = min(self.computed, junk)
            self.flying = [(one, begin, stop, ids, junk) for one, begin, stop, ids, _ in self.flying]
        found = report_of(number)
        self.p.on_worker_results(
            SimpleNamespace(finished_recving=set(), failed_recving=set(), kv_connector_worker_meta=found)
        )

    def move_a_block(self):
        """Copy on write: the request continues with a copy, and the block belongs to another request."""
        if self.flying:
            return
        place, new = self.rng.randrange(BLOCKS), self.rng.choice([b for b in range(200, 400) if b not in self.memory])
        old = self.tables[0][place]
        self.memory[new] = list(self.memory.get(old, [None] * SIZE))
        self.tables[0][place] = new
        self.junk.add(old)

    def overwrite(self):
        for block in self.rng.sample(sorted(self.junk), min(3, len(self.junk))):
            self.memory[block] = [-1] * SIZE

    def finish(self, status="FINISHED_LENGTH_CAPPED"):
        asked = self.asked_of_p
        asked.status.name = status
        asked.num_computed_tokens = self.computed
        self.over = status
        if self.p.on_request_finished(asked, self.tables) is None:
            self.junk.update(block for table in self.tables for block in table)

    # --- and at D

    def order(self):
        metadata = self.d.on_step(STEP)
        if metadata.loads:
            assert self.reading is None, "one read at a time"
            (self.reading,) = metadata.loads
            assert self.reading.piece is not any(len(span.ids) for span in self.reading.spans[1:])
            self.done = set()
        if metadata.refusals:
            self.done = None
        return metadata

    def read_some(self, *, all_of_it=False):
        if self.reading is None:
            return
        local, remote = self.reading.spans[0], self.reading.remote.spans[0]
        assert remote.first == 0
        left = [index for index in range(len(local.ids)) if index not in self.done]
        for index in left if all_of_it else self.rng.sample(left, len(left) // 2):
            source = remote.ids[local.first + index]
            self.held[local.ids[index]] = list(self.memory.get(source, [None] * SIZE))
            self.done.add(index)

    def report(self):
        """Return whether D has counted all of it as loaded."""
        if self.reading is None:
            return False
        self.read_some(all_of_it=True)
        piece, self.reading = self.reading.piece, None
        if not piece:
            self.d.on_worker_results(output(["r"]))
            return True
        lost = {"r": "lost"} if self.rng.random() < 0.1 else {}
        found = WorkerReport(pieces={"r": 1}, lost_pieces=lost)
        self.d.on_worker_results(
            SimpleNamespace(finished_recving=set(), failed_recving=set(), kv_connector_worker_meta=found)
        )
        return False

    def cut_the_connection(self):
        for call in list(self.d.context.peers._active):
            client = call.client
            if client is not None:
                with contextlib.suppress(OSError):  # the thread may just be closing it
                    client._socket.shutdown(2)


def blocks_of_d():
    tables = [list(range(500, 500 + BLOCKS)), list(range(600, 600 + BLOCKS)), [700]]
    return SimpleNamespace(
        blocks=tuple([SimpleNamespace(block_id=one, is_null=False, block_hash=None) for one in row] for row in tables)
    )


def run(machine):
    """Play one request; return how it ended."""
    rng, address = machine.rng, machine.p.context.engine.address
    machine.asked_of_p = request("at p", N, params={"do_remote_decode": True, "kvhma_ticket": machine.ticket})
    params = {"do_remote_prefill": True, "kvhma_ticket": machine.ticket}
    asked = request("r", N, params=params | {"remote_host": address.host, "remote_port": address.port})
    began = [lambda: machine.p.on_request_added(machine.asked_of_p), lambda: machine.d.on_request_added(asked)]
    rng.shuffle(began)
    for begin in began:
        begin()
    placed, pieces, cuts, deadline = False, 0, 0, time.monotonic() + 60
    # Decided once: a busy machine makes more rounds until P has answered.
    abort_at = rng.randrange(N) if rng.random() < 0.15 else N
    while True:
        assert time.monotonic() < deadline, f"no answer: {vars(machine)}, {vars(machine.d.decode)}"
        if not placed:
            tokens, _ = machine.d.matched_tokens(asked, 0)
            if tokens:
                machine.d.on_blocks_allocated(asked, blocks_of_d(), tokens)
                placed = True
        metadata = machine.order()
        pieces += sum(load.piece for load in metadata.loads)
        if metadata.refusals:
            return "refused", pieces
        event = rng.random()
        if machine.over is None and event < 0.35 and machine.computed < N and len(machine.flying) < 2:
            machine.build()
        elif machine.flying and event < 0.6:
            machine.results()
        elif machine.over is None and event < 0.63:
            machine.build(preempted=True)
        elif machine.over is None and event < 0.67:
            machine.move_a_block()
        elif event < 0.75 and cuts < MOST_CUTS:
            cuts += 1
            machine.cut_the_connection()
        elif machine.over is None and machine.computed == N and not machine.flying:
            machine.finish()
        elif machine.over is None and event > 0.75 and machine.computed > abort_at:
            machine.finish("FINISHED_ABORTED")
        elif event < 0.9:
            machine.read_some()
        elif machine.report():
            return "loaded", pieces
        machine.overwrite()
        time.sleep(rng.choice([0, 0, 0.001, 0.003]))


@pytest.mark.timeout(600)
def test_what_is_taken_for_loaded_is_what_p_has_computed(monkeypatch):
    ends, pieces = {}, 0
    for seed in range(RUNS):
        machine = Machine(seed)
        monkeypatch.setattr(following, "PIECE_TOKENS", machine.piece_tokens)
        try:
            how, read = run(machine)
            ends[how] = ends.get(how, 0) + 1
            pieces += read
            if how == "loaded":
                found = [machine.held[500 + token // SIZE][token % SIZE] for token in range(N)]
                assert found == list(range(N)), f"run {seed}"
                assert machine.d.decode.pending == {}
        finally:
            machine.close()
    print(ends, pieces)
    assert ends["loaded"] > RUNS * 0.6
    assert pieces > RUNS
