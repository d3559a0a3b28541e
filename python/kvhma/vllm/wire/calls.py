# SPDX-License-Identifier: Apache-2.0
"""What waits for another engine in a thread of its own: so many at a time, and so many for one address."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvhma.vllm.threads import in_thread
from kvhma.vllm.wire.params import Address

MAX_CALLS = 64
MAX_STRANGERS = 48
"""Of them to addresses where nobody has answered yet, which anybody may have named."""

MAX_AT_ADDRESS = 4
_MAX_KNOWN = 1024

ResultT = TypeVar("ResultT")


class Calls:
    """Starts threads, within bounds. Safe to use from several threads."""

    def __init__(self, done: Callable[[], None]) -> None:
        """Start without any; `done` is called after each."""
        self._done = done
        self._lock = threading.Lock()
        self._running: Counter[Address] = Counter()
        self._known: OrderedDict[Address, None] = OrderedDict()
        """Addresses where somebody has answered."""

    def start(self, address: Address, function: Callable[[], ResultT]) -> Future[ResultT] | None:
        """Call a function that waits for an address; return its result to come, None if there are too many now."""
        with self._lock:
            known = address in self._known
            alike = sum(count for one, count in self._running.items() if known or one not in self._known)
            if alike >= (MAX_CALLS if known else MAX_STRANGERS) or self._running[address] >= MAX_AT_ADDRESS:
                return None
            self._running[address] += 1
        try:
            future = in_thread("kvhma-call", function)
        except RuntimeError:  # there can be no more threads
            self._end(address)
            return None
        future.add_done_callback(lambda ended: self._note_end(address, ended))
        return future

    def _note_end(self, address: Address, ended: Future[ResultT]) -> None:
        if ended.exception() is None:
            with self._lock:
                self._known[address] = None
                self._known.move_to_end(address)
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        self._end(address)
        self._done()

    def _end(self, address: Address) -> None:
        with self._lock:
            self._running[address] -= 1
            if not self._running[address]:
                del self._running[address]
