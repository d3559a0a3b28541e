# SPDX-License-Identifier: Apache-2.0
"""vLLM's own loop and the connector's scheduler: how often an engine steps that only holds blocks for peers."""

import contextlib
import queue
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from kvhma.vllm import internals
from kvhma.vllm.holds import engine_loop
from kvhma.vllm.holds.lease_table import OVERDUE_SECONDS
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import PrefillParams
from kvhma.vllm.wire.secrets import Secrets
from support.schedulers import STEP, kept, request, scheduler, tables
from support.waiting import until


class Loop(EngineCoreProc):
    """vLLM's loop, with a counter of steps in place of its scheduler and model."""

    def __init__(self, kvhma):
        self.kvhma = kvhma
        self.steps = 0
        self.stuck = threading.Event()
        self.stuck.set()
        self.scheduler = SimpleNamespace(
            has_requests=lambda: bool(self.asked) or kvhma.needs_step(),
            get_num_unfinished_requests=lambda: 0,
            finish_requests=lambda *_: [],
            set_pause_state=lambda state: setattr(self.scheduler, "pause_state", state),
            pause_state=PauseState.UNPAUSED,
        )
        self.stats = []
        self.asked = []
        """Requests that wait for a step."""
        self.input_queue, self.output_queue, self.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
        self.engines_running = self.publish_dp_lb_stats = self.has_coordinator = False
        self.batch_queue = None
        self.shutdown_state = EngineShutdownState.RUNNING
        self.process_input_queue_block = True
        self._idle_state_callbacks = []
        self.step_fn = self._step
        self.vllm_config = SimpleNamespace(shutdown_timeout=0)
        self.ended = Future()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.run_busy_loop()
        except SystemExit:
            self.ended.set_result(None)
        except BaseException as error:
            self.ended.set_exception(error)

    def _step(self):
        if not self.scheduler.has_requests():  # vLLM asks again
            return {}, False
        for name in self.asked:
            asked = request(name, params={"do_remote_decode": True})
            self.kvhma.on_request_added(asked)
            self.params = self.kvhma.on_request_finished(asked, tables(self.kvhma))
        self.asked.clear()
        self.kvhma.on_step(STEP)
        self.stats.append(self.kvhma.take_stats())
        self.steps += 1
        self.stuck.wait()
        return {}, False

    def post_step(self, model_executed):
        pass

    def _finish_pause(self, clear_cache):
        pass

    def _send_abort_outputs(self, aborted):
        pass

    def tell(self, method, *args):
        """Have the loop call a method between two steps, as one of vLLM's utilities; return what it returned."""
        found = Future()
        self.call = lambda: found.set_result(getattr(self, method)(*args))
        self.input_queue.put((b"call", None))
        return found.result(10)

    def _handle_client_request(self, request_type, request):
        if request_type == b"call":
            self.call()
        elif request_type == b"ask":
            self.asked.append(request)
        else:
            super()._handle_client_request(request_type, request)

    def keep(self, name="at p"):
        """Have the loop end a request, whose blocks are held; return the claim of its reader."""
        before = self.steps
        self.input_queue.put((b"ask", name))
        until(lambda: self.steps > before and not self.asked)
        return PrefillParams.from_params(self.params, Secrets(), num_prompt_tokens=40).claim(reader=1)

    def release(self, claim):
        self.kvhma.context.leases.renew([claim])
        self.kvhma.context.leases.release([claim], Outcome.READ)

    def close(self):
        for key in list(self.kvhma.context.leases._held):
            self.kvhma.context.leases.evict(key)
        self.shutdown_state = EngineShutdownState.REQUESTED
        self.input_queue.put((b"call", None))
        self.call = lambda: None
        self.ended.result(10)


@pytest.fixture
def loops():
    """Make schedulers and their loops."""
    with contextlib.ExitStack() as stack:

        def make(**settings):
            kvhma = stack.enter_context(contextlib.closing(scheduler(**settings)))
            return stack.enter_context(contextlib.closing(Loop(kvhma)))

        yield make


@pytest.fixture
def loop(loops):
    return loops()


def steps_in(loop, seconds):
    before = loop.steps
    time.sleep(seconds)
    return loop.steps - before


def goes_on(loop, steps=100):
    """Wait for steps; a sleeping loop needs minutes for this number."""
    before = loop.steps
    until(lambda: loop.steps > before + steps)


def test_an_engine_that_keeps_blocks_rests(loop, monkeypatch):
    monkeypatch.setattr(engine_loop, "_STEP_SECONDS", 1e9)
    claim = loop.keep()
    assert steps_in(loop, 1.5) == 0
    loop.release(claim)
    assert kept(loop.kvhma), "no request needs them at once"
    before = loop.steps
    until(lambda: not kept(loop.kvhma))
    assert steps_in(loop, 1.5) == 0
    assert loop.steps == before


def test_a_pause_does_not_wait_for_a_report(loop, monkeypatch):
    """The report follows after it."""
    loop.release(loop.keep())
    until(lambda: not kept(loop.kvhma))
    assert loop.tell("pause_scheduler", "wait", True) is None
    monkeypatch.setattr(engine_loop, "_STEP_SECONDS", 0.0)
    assert steps_in(loop, 1.5) == 0
    before = loop.steps
    loop.tell("resume_scheduler")
    until(lambda: loop.steps > before)


def test_a_lease_that_ends_wakes_it_up(loop, caplog):
    loop.kvhma.context.leases._lease = 0.5
    loop.keep()
    until(lambda: not kept(loop.kvhma))
    assert loop.steps <= 10 * (OVERDUE_SECONDS + 0.5) / engine_loop._TICK_SECONDS
    assert "no decode engine has asked for it" in caplog.text


def test_it_is_asked_to_step_once_however_long_the_step_takes(loop, monkeypatch):
    monkeypatch.setattr(engine_loop, "_TICK_SECONDS", 0.01)
    first, second = loop.keep("a"), loop.keep("b")
    loop.stuck.clear()
    before = loop.steps
    loop.input_queue.put((b"ask", "c"))
    until(lambda: loop.steps > before)
    loop.release(first)
    loop.release(second)
    time.sleep(0.3)
    assert loop.input_queue.qsize() == 1
    loop.stuck.set()
    until(lambda: len(loop.kvhma.context.leases) == 1 and not loop.kvhma.context.leases.has_ended())


def test_a_shutdown_waits_for_readers(loop):
    """As long as vLLM allows."""
    claim = loop.keep()
    loop.shutdown_state = EngineShutdownState.REQUESTED
    loop.tell("is_running")
    goes_on(loop)
    assert not loop.ended.done()
    loop.release(claim)
    loop.ended.result(10)
    assert not kept(loop.kvhma)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_leaves_to_readers_what_it_does_not_clear(loop, monkeypatch, mode):
    """The claims of readers need not end. A paused engine frees what they release."""
    monkeypatch.setattr(engine_loop, "_STEP_SECONDS", 0.0)
    claim = loop.keep()
    until(lambda: loop.tell("pause_scheduler", mode, False) is None)  # not in the step that is due
    held, before = kept(loop.kvhma), loop.steps
    assert held
    loop.release(claim)
    until(lambda: not kept(loop.kvhma))
    assert loop.steps == before, "a paused engine makes no steps"


def test_a_thread_that_has_begun_again_still_wakes_the_loop_up(loop, monkeypatch):
    monkeypatch.setattr(engine_loop, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(engine_loop, "_STEP_SECONDS", 1e9)
    leases, failed = loop.kvhma.context.leases, threading.Event()
    has_ended = leases.has_ended

    def fails_once():
        if failed.is_set():
            return has_ended()
        failed.set()
        raise MemoryError

    monkeypatch.setattr(leases, "has_ended", fails_once)
    claim = loop.keep()
    assert failed.wait(10)
    loop.release(claim)
    until(lambda: not kept(loop.kvhma))


class SlowBoards:
    """Boards at which a listener's thread loses Python's lock while a lease ends."""

    def __init__(self, boards):
        self.boards = boards
        self.entered, self.go_on = threading.Event(), threading.Event()

    def hide_mark(self, place):
        self.boards.hide_mark(place)
        self.entered.set()
        self.go_on.wait(20)


@pytest.mark.parametrize("ends", [False, True])
def test_a_lease_is_never_seen_in_neither_place(loop, ends, monkeypatch):
    monkeypatch.setattr(engine_loop, "_STEP_SECONDS", 1e9)
    claim, leases = loop.keep(), loop.kvhma.context.leases
    slow = leases._boards = SlowBoards(leases._boards)
    leases.renew([claim])
    listener = threading.Thread(target=leases.release, args=([claim], Outcome.READ))
    listener.start()
    slow.entered.wait()
    assert not leases.is_empty
    if ends:
        loop.shutdown_state = EngineShutdownState.REQUESTED
    loop.tell("is_running")  # the loop looks whether it may rest, or end
    slow.go_on.set()
    listener.join()
    until(lambda: not kept(loop.kvhma))


def test_an_engine_in_the_process_of_its_front_end_steps_on():
    """It has no loop that could sleep."""
    with contextlib.closing(scheduler()) as kvhma:
        asked = request("at p", params={"do_remote_decode": True})
        kvhma.on_request_added(asked)
        assert not kvhma.needs_step()
        kvhma.on_request_finished(asked, tables(kvhma))
        assert kvhma.needs_step()


def test_a_loop_without_the_queue_that_is_known_steps_on(loop, monkeypatch):
    """A later vLLM may have other names."""
    monkeypatch.setattr(internals, "_LOOP", ("no_such_name",))
    loop.keep()
    goes_on(loop, 20)


def test_workers_that_sum_are_stepped_for(loops):
    """Their sums come with the results of a step; a worker that cannot sum only logs it."""
    loop = loops(content_digests=1.0)
    loop.keep()
    goes_on(loop, 2)
    until(lambda: steps_in(loop, 1.0) <= 1)  # D has timed out by then
