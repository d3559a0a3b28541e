# SPDX-License-Identifier: Apache-2.0
"""How a scheduler or a worker reaches the listeners of other engines: a thread asks, so that no caller waits.

ask -> queued -> look-up of a name -> connecting -> asked -> answered, or an error
         |                                            |
         '------------ an idle connection ------------'
"""

from __future__ import annotations

import math
import resource
import select
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from kvhma.errors import HandshakeError, HandshakeTimeoutError
from kvhma.vllm.config.allow_list import AllowedSources
from kvhma.vllm.counters import Counters
from kvhma.vllm.peers.client import Client, IdleClients
from kvhma.vllm.peers.names import look_up
from kvhma.vllm.peers.sockets import Waker
from kvhma.vllm.threads import SupervisedThread
from kvhma.vllm.wire.messages import AnswerT, Question
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.peer_log import logger
from kvhma.vllm.wire.secrets import Secrets

MAX_WAITING = 2048
"""Most calls that wait for an answer at a time; at most an eighth of the process's file descriptors, too.

As many connections may be idle, and a process may have two of these: its scheduler's and its worker's.
"""

MAX_AT_ADDRESS = 64
"""Most short calls that wait for one address, and most long ones: the peer decides when it answers those.

All long calls together may be half of `MAX_WAITING`."""

_MAX_QUEUED = 8192
"""Most calls that wait for room. Further calls fail at once."""

_IDLE_SECONDS = 60.0
"""How long an idle connection stays."""

_TURN_SECONDS = 1.0
"""Longest time between two turns of the thread, and between two looks for connections to close."""

_RETRY_SECONDS = 1.0
"""Pause after a task that has failed."""

_CLOSE_SECONDS = 1.0
"""How long :meth:`Peers.close` waits for the thread."""

_BUSY_SECONDS = 0.01
"""Processor time after which the thread pauses as long: peers decide how much they send."""

Task = Callable[[float], float]
"""Takes the time on the monotonic clock, and returns when it wants to run again."""


class Call(Future[AnswerT]):
    """A question to another engine, and the future of its answer. :class:`Peers` makes it."""

    def __init__(
        self, address: Address, question: Question, kind: type[AnswerT], on_received: Callable[[int], None] | None
    ) -> None:
        """Arguments as for :meth:`Peers.ask`."""
        super().__init__()
        self.address = address
        self.question = question
        self.kind: type[AnswerT] = kind
        self.on_received = on_received
        self.is_long = question.is_long
        self.begun = self.deadline = math.inf
        """When the thread began to ask, and until when it waits for what comes next."""
        self.last_deadline = math.inf
        self.anew = False
        self.name: Future[Address] | None = None
        """The look-up of the address, until it is done."""
        self.client: Client | None = None
        self.watched: int | None = None
        """File descriptor of the connection, if the thread waits for it: the client may have closed its socket."""
        self.is_over_idle = False
        """Whether the connection was idle before: the peer may have closed it."""


class Peers:
    """Asks other engines. A scheduler has one, and so has each worker; any thread may use it.

    The calls that wait are bounded, in all and for each address; further calls wait in turn. So clients that name
    hundreds of silent addresses may keep other calls waiting.

    Attributes:
        timeout: seconds for a look-up, for a connection, and for each answer.
        idle: connections without a question. With one of these a thread can ask without another thread.
    """

    def __init__(
        self, timeout: float, secrets: Secrets, counters: Counters, sources: AllowedSources | None = None
    ) -> None:
        """Start without a thread: the first question or task starts it.

        Args:
            timeout: see above.
            secrets: of this engine.
            counters: count restarts of the thread.
            sources: refuse names that lead to other hosts than they may; None to connect to any host.
        """
        self.timeout = timeout
        self._secrets = secrets
        self._counters = counters
        self._sources = sources
        self._lock = threading.Lock()
        self._asked: deque[Call[Any]] = deque()
        """Calls that the thread has not seen yet."""
        self._cancelled: deque[Call[Any]] = deque()
        self._tasks: dict[Task, float] = {}
        """When each task runs next."""
        self.idle = IdleClients(secrets, MAX_AT_ADDRESS)
        self._closing = False
        self._thread: SupervisedThread | None = None
        self._waker: Waker | None = None
        # Only the thread uses these:
        self._limit = max(4, min(MAX_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
        """Most active calls, and most idle connections."""
        self._queued: dict[Call[Any], None] = {}
        self._active: dict[Call[Any], None] = {}
        self._active_at: Counter[tuple[Address, bool]] = Counter()
        """Number of short and of long calls, by address."""
        self._active_long = 0
        self._has_changed = False
        """Whether a queued call may have room now."""
        self._selector: selectors.BaseSelector
        self._swept_at = time.monotonic()

    # --- for any thread ------------------------------------------------------------------------------------

    def ask(
        self,
        address: Address,
        question: Question,
        kind: type[AnswerT],
        *,
        deadline: float = math.inf,
        on_received: Callable[[int], None] | None = None,
        anew: bool = False,
    ) -> Call[AnswerT]:
        """Ask an engine. The result of the call is the answer, or a `HandshakeError`; its callbacks run in the thread.

        Args:
            address: of its listener.
            question: what to ask.
            kind: of the answer.
            deadline: for the answer, on the monotonic clock; the timeout holds beside it.
            on_received: the thread calls it with the bytes so far of an unfinished answer. The call fails with what it
                raises.
            anew: whether to ask over a new connection, and close it: an old one may lead to another host than the
                address does now.
        """
        call = Call(address, question, kind, on_received)
        call.last_deadline, call.anew = deadline, anew
        with self._lock:
            closing = self._closing
            if not closing:
                self._asked.append(call)
        if closing:
            call.set_exception(HandshakeTimeoutError(f"{address} is not asked: this engine stops"))
        self._wake()
        return call

    def cancel(self, call: Call[Any]) -> None:
        """Stop waiting for an answer. Callbacks of the call run in this thread."""
        if call.cancel():
            self._cancelled.append(call)
            self._wake()

    def check_host(self, address: Address, numeric: Address) -> None:
        """Refuse a host that this engine may not read from. Ask it after each look-up: a name may lead elsewhere then.

        Raises:
            HandshakeError: the text names the address, what it is, and the settings.
        """
        refusal = None if self._sources is None else self._sources.refusal_of_host(address, numeric)
        if refusal is not None:
            self._counters.count("refused_sources", label="not_allowed")
            raise HandshakeError(f"remote_host and remote_port: {refusal}")

    def run_task(self, task: Task, at: float = 0.0) -> bool:
        """Run a task in the thread, at a time on the monotonic clock or before, and again when it wants to.

        Returns:
            Whether the thread runs. If it does not, a later question or task starts it.
        """
        self._plan_task(task, at)
        self._wake()
        return self._thread is not None

    def close(self) -> None:
        """Stop the thread, which then ends calls without an answer: their callbacks belong to it."""
        with self._lock:
            self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        else:
            self._fail_all(self._asked)
        self.idle.close()
        if self._waker is not None:
            self._waker.close()

    def _wake(self) -> None:
        """Wake the thread, or start it."""
        unasked: list[Call[Any]] = []
        with self._lock:
            if self._thread is None and not self._closing:
                try:
                    self._start_thread()
                except (RuntimeError, OSError) as error:  # there can be no more threads, or no more sockets
                    logger.warning("kvhma: cannot ask other engines: %s", error)
                    unasked = list(self._asked)
                    self._asked.clear()
        for call in unasked:
            _fail(call, HandshakeTimeoutError(f"{call.address} is not asked: no thread could be started"))
        if self._waker is not None:
            self._waker.wake()

    def _plan_task(self, task: Task, at: float) -> None:
        with self._lock:
            self._tasks[task] = min(self._tasks.get(task, math.inf), at)

    def _start_thread(self) -> None:
        if self._waker is None:
            self._waker = Waker()
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = SupervisedThread("kvhma-peers", self._run, self._counters)

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        ready: list[Any] = []
        busy = 0.0
        while not self._closing:
            cpu = time.thread_time()
            self._take_turn(ready)
            busy += time.thread_time() - cpu
            if busy > _BUSY_SECONDS:
                time.sleep(busy)
                busy = 0.0
            waits = time.monotonic()
            ready = [key.data for key, _ in self._selector.select(self._pause(waits))]
            busy = max(0.0, busy - (time.monotonic() - waits))
        self._stop()

    def _take_turn(self, ready: list[Any]) -> None:
        """Do all that can be done without waiting; `ready` are the calls whose connection is ready."""
        if self._waker is not None:
            self._waker.drain()
        now = time.monotonic()
        self._run_tasks(now)
        self._take_calls()
        late = [call for call in self._active if call.deadline <= now or (call.name is not None and call.name.done())]
        for call in dict.fromkeys([*ready, *late]):
            if call in self._active:  # `None` is the wake-up, and a call may have ended in this turn
                self._attempt(call, self._receive)
        if self._has_changed:
            self._start_calls()
        if now - self._swept_at > _TURN_SECONDS:
            self._swept_at = now
            self.idle.close_unused(now - _IDLE_SECONDS, self._limit)

    def _run_tasks(self, now: float) -> None:
        with self._lock:
            due = [task for task, at in self._tasks.items() if at <= now]
            self._tasks |= dict.fromkeys(due, math.inf)
        error: BaseException | None = None
        for task in due:
            wanted = now + _RETRY_SECONDS
            try:
                wanted = task(now)
            except BaseException as raised:  # the other tasks run all the same
                error = error or raised
            self._plan_task(task, wanted)
        if error is not None:
            raise error

    def _take_calls(self) -> None:
        """Queue new calls, and drop cancelled ones."""
        while self._asked:
            call = self._asked.popleft()
            if len(self._queued) >= _MAX_QUEUED:
                _fail(call, HandshakeTimeoutError(f"{call.address} is not asked: too many questions wait"))
                continue
            self._queued[call] = None
            self._has_changed = True
        while self._cancelled:
            call = self._cancelled.popleft()
            self._queued.pop(call, None)
            if call in self._active:
                self._release(call)

    def _start_calls(self) -> None:
        """Ask what has room, in turn."""
        self._has_changed = False
        for call in list(self._queued):
            if len(self._active) >= self._limit:
                return
            if self._active_at[call.address, call.is_long] >= MAX_AT_ADDRESS:
                continue
            if call.is_long and self._active_long >= self._limit // 2:
                continue
            del self._queued[call]
            if not call.cancelled():
                self._start(call)

    def _start(self, call: Call[Any]) -> None:
        self._active[call] = None
        self._active_at[call.address, call.is_long] += 1
        self._active_long += call.is_long
        call.begun = time.monotonic()
        self._attempt(call, self._begin)

    def _attempt(self, call: Call[Any], what: Callable[[Call[Any]], None]) -> None:
        """Do something for a call; an error ends it."""
        try:
            try:
                what(call)
            except HandshakeTimeoutError:
                # The peer may have closed the idle connection, as listeners do.
                if not call.is_over_idle or call.client is None or call.client.received:
                    raise
                if time.monotonic() >= min(call.deadline, call.last_deadline):
                    raise
                call.is_over_idle = False
                self._disconnect(call)
                self._connect(call)
        except BaseException as error:  # it ends this call and no other one
            if call in self._active:
                self._release(call)
                _fail(call, error)
            if not isinstance(error, Exception):
                raise

    def _begin(self, call: Call[Any]) -> None:
        call.client = None if call.anew else self.idle.take_client(call.address)
        call.is_over_idle = call.client is not None
        if call.is_over_idle:
            self._send(call)
        else:
            self._connect(call)

    def _connect(self, call: Call[Any]) -> None:
        call.deadline = min(time.monotonic() + self.timeout, call.last_deadline)
        if call.address.is_numeric:
            self._dial(call, call.address)
            return
        call.name = look_up(call.address)  # it may be another host by now
        call.name.add_done_callback(lambda _: self._wake())

    def _dial(self, call: Call[Any], numeric: Address) -> None:
        call.client = Client(numeric, self.timeout, self._secrets, wait=False)
        self._send(call)

    def _send(self, call: Call[Any]) -> None:
        assert call.client is not None  # noqa: S101
        call.client.on_received = call.on_received
        call.client.send(call.question, deadline=call.last_deadline)
        self._receive(call)

    def _receive(self, call: Call[Any]) -> None:
        """End a call if its answer is here; otherwise wait for what its connection waits for."""
        client = call.client
        if client is None:
            self._take_name(call)
        elif client.poll():
            answer = client.receive(call.kind)
            self._release(call)
            if call.set_running_or_notify_cancel():
                call.set_result(answer)
        else:
            call.deadline = client.deadline
            self._watch(call, client)

    def _take_name(self, call: Call[Any]) -> None:
        if call.name is not None and call.name.done():
            name, call.name = call.name, None
            numeric = name.result()
            self.check_host(call.address, numeric)
            self._dial(call, numeric)
        elif time.monotonic() >= call.deadline:
            raise HandshakeTimeoutError(f"the name of {call.address} was not looked up in {self.timeout} s")

    def _watch(self, call: Call[Any], client: Client) -> None:
        events = selectors.EVENT_READ * bool(client.events & select.POLLIN)
        events |= selectors.EVENT_WRITE * bool(client.events & select.POLLOUT)
        if call.watched is None:
            self._selector.register(client.fileno(), events, call)
            call.watched = client.fileno()
        elif self._selector.get_key(call.watched).events != events:
            self._selector.modify(call.watched, events, call)

    def _detach_client(self, call: Call[Any]) -> Client | None:
        """Take the connection from a call."""
        if call.watched is not None:
            self._selector.unregister(call.watched)
            call.watched = None
        client, call.client = call.client, None
        return client

    def _disconnect(self, call: Call[Any]) -> None:
        if (client := self._detach_client(call)) is not None:
            client.close()

    def _release(self, call: Call[Any]) -> None:
        """Stop a call, and keep its connection if that is idle."""
        del self._active[call]
        self._active_at[call.address, call.is_long] -= 1
        if not self._active_at[call.address, call.is_long]:
            del self._active_at[call.address, call.is_long]
        self._active_long -= call.is_long
        self._has_changed = True
        if (client := self._detach_client(call)) is not None:
            client.on_received = None
            if call.anew:
                client.close()
            else:
                self.idle.release_client(call.address, client)

    def _pause(self, now: float) -> float:
        """Return the seconds until something is due."""
        if self._has_changed:
            return 0.0
        with self._lock:
            due = list(self._tasks.values())
        return max(0.0, min([now + _TURN_SECONDS, *due, *(call.deadline for call in self._active)]) - now)

    def _stop(self) -> None:
        for call in list(self._active):
            self._disconnect(call)
        self._fail_all([*self._active, *self._queued, *self._asked])
        self._selector.close()

    def _fail_all(self, calls: Iterable[Call[Any]]) -> None:
        for call in calls:
            _fail(call, HandshakeTimeoutError(f"{call.address} has not answered: this engine stops"))


def _fail(call: Call[Any], error: BaseException) -> None:
    if not call.done() and call.set_running_or_notify_cancel():
        call.set_exception(error.with_traceback(None) if isinstance(error, HandshakeError) else error)
