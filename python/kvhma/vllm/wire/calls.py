# SPDX-License-Identifier: Apache-2.0
"""Calls that wait for another engine, each in its own thread: limited in all, and for each address."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvhma.vllm.threads import in_thread
from kvhma.vllm.wire.params import Address

MAX_CALLS = 64
MAX_UNKNOWN_PEERS = 48
"""The limit for calls to addresses that have never answered. Any client may have named those."""

MAX_AT_ADDRESS = 4
_MAX_KNOWN = 1024

ResultT = TypeVar("ResultT")


class Calls:
    """Starts threads, within the limits. Safe to use from several threads."""

    def __init__(self, done: Callable[[], None]) -> None:
        """Start without calls; `done` is called after each."""
        self._done = done
        self._lock = threading.Lock()
        self._running: Counter[Address] = Counter()
        self._known: OrderedDict[Address, None] = OrderedDict()
        """Addresses that have answered."""

    def start(self, address: Address, function: Callable[[], ResultT]) -> Future[ResultT] | None:
        """Call a function that waits for an address; return its future, or None while there are too many calls."""
        with self._lock:
            known = address in self._known
            counted = sum(count for called, count in self._running.items() if known or called not in self._known)
            if counted >= (MAX_CALLS if known else MAX_UNKNOWN_PEERS) or self._running[address] >= MAX_AT_ADDRESS:
                return None
            self._running[address] += 1
        try:
            future = in_thread("kvhma-call", function)
        except RuntimeError:  # there can be no more threads
            self._end_call(address)
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
        self._end_call(address)
        self._done()

    def _end_call(self, address: Address) -> None:
        with self._lock:
            self._running[address] -= 1
            if not self._running[address]:
                del self._running[address]
