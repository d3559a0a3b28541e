# SPDX-License-Identifier: Apache-2.0
"""A request that is to be loaded from another engine, and how far it is."""

from __future__ import annotations

import enum
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhma.vllm.metadata import Failure
from kvhma.vllm.scheduler.following import FollowedLoad
from kvhma.vllm.tracing import Trace
from kvhma.vllm.wire.params import PrefillParams, random_id

if TYPE_CHECKING:
    from vllm.v1.request import Request


_SAMPLE = re.compile(r"\d+_")
"""How vLLM begins the name of one of several samples of a prompt; a client may choose such a name too."""


def is_sample(request_id: str) -> bool:
    """Return whether a request may be one of several samples of a prompt."""
    return _SAMPLE.match(request_id) is not None


class LoadState(enum.Enum):
    """How far a pending load is."""

    WANTED = enum.auto()
    FOLLOWING = enum.auto()
    """It has blocks, and is read in pieces while P computes its prompt."""

    LOADING = enum.auto()


@dataclass
class PendingLoad:
    """A request that is to be loaded from P. It is forgotten once it is loaded, computed here or finished.

    Attributes:
        remote: what P said; None if it could not be read.
        refusal: why it cannot be loaded; None if it can.
        num_tokens: tokens to have afterwards.
        state: whether the workers load it.
        tries: loads so far.
        finished: whether the request ended while it was loading.
        aborted: whether it ended because its client aborted it.
        ask_first: whether others read the same blocks, so that P has to say that it holds them before they are loaded.
        since: when the request was added, on the monotonic clock.
        asked_since: when vLLM first asked how much is loaded for it; None before.
        reader: random number by which P knows this reader of its blocks.
        claimed: whether P is told, again and again, that the request needs its blocks.
        traceparent: of its request, if that is traced.
        first_tokens: of the ranks that have loaded, see `WorkerReport`.
        prefilled: the request, if this engine prefills it and computes whatever it cannot read of the turn before; None
            if it decodes it, so that the engine's ``kv_load_failure_policy`` decides about a load that fails.
        unheard: whether a rank has not asked P, since its lease board has shown what it holds.
        lost: whether a rank has failed to load one that is prefilled.
        followed: how it is read while P computes its prompt; None if P has computed it.
    """

    remote: PrefillParams | None
    refusal: Failure | None = None
    num_tokens: int = 0
    state: LoadState = LoadState.WANTED
    tries: int = 0
    finished: bool = False
    aborted: bool = False
    ask_first: bool = False
    since: float = field(default_factory=time.monotonic)
    asked_since: float | None = None
    reader: int = field(default_factory=random_id)
    claimed: bool = False
    traceparent: str | None = None
    first_tokens: dict[int, int] = field(default_factory=dict)
    prefilled: Request | None = None
    unheard: bool = False
    lost: bool = False
    followed: FollowedLoad | None = None

    def trace(self) -> Trace | None:
        """Return what the workers have to know of its trace, when a try has been counted and is ordered."""
        if self.traceparent is None:
            return None
        return Trace(self.traceparent, 0.0 if self.tries > 1 else time.monotonic() - self.since)
