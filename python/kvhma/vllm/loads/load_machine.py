# SPDX-License-Identifier: Apache-2.0
"""The state machine of a load: a request of this engine (D) whose cache another engine (P) has computed.

One request has one load, from the call in which vLLM adds it until it is loaded, computed locally or over. `TABLE` has
all states and all that changes them: a state and an event give the next state and the effects. The owner of the load
carries out the effects in their order. Nothing here does I/O or looks at a clock. The scheduler's thread owns all
loads.

The usual ways are::

    NEW -- params --> COMPARING -- same --> WAITING -- blocks --> LOADING -- loaded --> GONE
    NEW -- ticket --> FOLLOWING -- blocks --> PIECES -- handed off --> LOADING -- loaded --> GONE

D compares the prompt that P has computed with its own (COMPARING), because everything else relies on it. If other
requests read the same blocks, P must confirm first that it still holds them (ASKING). Then the load waits until vLLM
has blocks for it (WAITING), and the workers read (LOADING). A read that failed for a transient reason is tried again
(RETRYING). A ticket names a request that P still computes: D follows it (FOLLOWING), and once it has blocks it reads
them in pieces (PIECES).

vLLM has no call to fail a request that waits. Such a load asks vLLM for a block (REFUSED), and then has the workers
report it as failed (FAILING), so that ``kv_load_failure_policy`` decides. The load ends as LOCAL if D computes the
prompt itself, and as GONE if there is nothing left to do.

Beside the state a load has values, which decide nothing by themselves: see `Load`.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhma.vllm.wire.params import LeaseClaim, PrefillParams, random_id

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvhma.vllm.failures import Failure


class LoadState(enum.Enum):
    """What a load waits for."""

    NEW = "its parameters or its ticket are read"
    COMPARING = "a thread makes the digest of its prompt's tokens"
    ASKING = "P confirms that it holds the blocks"
    WAITING = "vLLM finds blocks for it"
    FOLLOWING = "P computes its prompt, and the load has no blocks yet"
    PIECES = "P computes its prompt, and the workers read what P has finished"
    LOADING = "the workers read"
    RETRYING = "vLLM finds blocks for it again, after a read that failed"
    REFUSED = "vLLM gives it a block, with which it fails"
    FAILING = "the workers report it as failed"
    LOCAL = "nothing: D computes the prompt"
    GONE = "nothing: it is loaded, or has ended; after a failed read D may compute the prompt"

    @property
    def is_end(self) -> bool:
        """Whether nothing more happens to the load."""
        return self in _ENDS


class LoadEvent(enum.Enum):
    """What happens to a load."""

    PARAMS = "the request has parameters of what P holds"
    TICKET = "the request has a ticket"
    OPTIONAL = "this engine prefills it, and P may hold the beginning"
    SAME_PROMPT = "P has computed the same prompt"
    SHARED = "other requests read the same blocks"
    HELD = "P holds the blocks, or does not answer"
    LASTS = "it still waits for blocks, or reads for more than 50 ms: P must hold the blocks for longer"
    BLOCKS = "it has blocks to fill"
    UNREADABLE = "it has blocks, and what P said cannot be read into them"
    NOTHING_TO_LOAD = "vLLM takes no tokens of it"
    SETTLED = "P has finished a piece"
    HANDED_OFF = "P has computed the prompt of the ticket"
    TICKET_LOST = "P does not compute the prompt of the ticket any more, or takes too long"
    LOCAL = "D computes the prompt"
    REFUSED = "the request must fail"
    LOADED = "all ranks have read it, or have ended its pieces"
    FAILED = "a rank has failed, and D does not retry"
    FAILED_TRANSIENT = "a rank has failed, the policy is `recompute`, and D retries"
    ENDED = "the request has ended"
    ABORTED = "the client has aborted the request"
    CANCELLED = "the request has ended, and no piece is being read"


class LoadEffect(enum.Enum):
    """What the owner of a load does about an event."""

    CLAIM = "renew P's lease, from now on"
    PLACE = "note which blocks the pieces fill"
    ORDER = "have the workers read"
    CANCEL_READ = "have the workers end the pieces"
    REPORT_FAILED = "have the workers report it as failed"
    COMPUTE_LOCALLY = "say and count that D computes the prompt"
    RELEASE = "notify P that it was read, or is not needed"
    RELEASE_UNNOTIFIED = "RELEASE, unless a worker has notified P"
    RELEASE_UNREAD = "notify P that it was not read: another engine may read it"
    RELEASE_FAILED = (
        "RELEASE if D computes the prompt or the client has aborted it, RELEASE_UNREAD if the request fails"
    )
    TICKET_HANDED_OFF = "end the ticket: P has handed it off"
    TICKET_LATE = "end the ticket: P has handed it off, and nothing was read before"
    TICKET_LOST = "end the ticket: P has ended it"
    TICKET_REFUSED = "cancel the ticket: P computes another prompt"
    TICKET_CANCELLED = "cancel the ticket: it is not needed"


_S, _E, _F = LoadState, LoadEvent, LoadEffect

TABLE: Mapping[tuple[LoadState, LoadEvent], tuple[LoadState, tuple[LoadEffect, ...]]] = {
    (_S.NEW, _E.PARAMS): (_S.COMPARING, ()),
    (_S.NEW, _E.TICKET): (_S.FOLLOWING, ()),
    (_S.NEW, _E.OPTIONAL): (_S.ASKING, (_F.CLAIM,)),
    (_S.NEW, _E.LOCAL): (_S.LOCAL, (_F.COMPUTE_LOCALLY,)),
    (_S.NEW, _E.REFUSED): (_S.REFUSED, ()),
    (_S.NEW, _E.NOTHING_TO_LOAD): (_S.GONE, ()),
    # Of another prompt P hears nothing: a client may have sent parameters of somebody else.
    (_S.COMPARING, _E.SAME_PROMPT): (_S.WAITING, ()),
    (_S.COMPARING, _E.LOCAL): (_S.LOCAL, (_F.COMPUTE_LOCALLY,)),
    (_S.COMPARING, _E.REFUSED): (_S.REFUSED, ()),
    (_S.ASKING, _E.HELD): (_S.WAITING, ()),
    (_S.ASKING, _E.NOTHING_TO_LOAD): (_S.GONE, (_F.RELEASE,)),
    (_S.ASKING, _E.LOCAL): (_S.LOCAL, (_F.COMPUTE_LOCALLY, _F.RELEASE)),
    (_S.ASKING, _E.REFUSED): (_S.REFUSED, (_F.RELEASE_UNREAD,)),
    (_S.ASKING, _E.ENDED): (_S.GONE, (_F.RELEASE_UNREAD,)),
    (_S.ASKING, _E.ABORTED): (_S.GONE, (_F.RELEASE,)),
    (_S.WAITING, _E.SHARED): (_S.ASKING, (_F.CLAIM,)),
    (_S.WAITING, _E.LASTS): (_S.WAITING, (_F.CLAIM,)),
    (_S.WAITING, _E.BLOCKS): (_S.LOADING, (_F.ORDER,)),
    (_S.WAITING, _E.UNREADABLE): (_S.FAILING, (_F.REPORT_FAILED, _F.RELEASE_FAILED)),
    (_S.WAITING, _E.NOTHING_TO_LOAD): (_S.GONE, (_F.RELEASE,)),
    (_S.WAITING, _E.LOCAL): (_S.LOCAL, (_F.COMPUTE_LOCALLY, _F.RELEASE)),
    (_S.WAITING, _E.REFUSED): (_S.REFUSED, (_F.RELEASE_UNREAD,)),
    (_S.WAITING, _E.ENDED): (_S.GONE, (_F.RELEASE_UNREAD,)),
    (_S.WAITING, _E.ABORTED): (_S.GONE, (_F.RELEASE,)),
    (_S.FOLLOWING, _E.HANDED_OFF): (_S.NEW, (_F.TICKET_LATE,)),
    (_S.FOLLOWING, _E.BLOCKS): (_S.PIECES, (_F.PLACE,)),
    (_S.FOLLOWING, _E.UNREADABLE): (_S.FAILING, (_F.TICKET_CANCELLED, _F.REPORT_FAILED)),
    (_S.FOLLOWING, _E.NOTHING_TO_LOAD): (_S.GONE, (_F.TICKET_CANCELLED,)),
    (_S.FOLLOWING, _E.LOCAL): (_S.LOCAL, (_F.TICKET_REFUSED, _F.COMPUTE_LOCALLY)),
    (_S.FOLLOWING, _E.REFUSED): (_S.REFUSED, (_F.TICKET_REFUSED,)),
    (_S.FOLLOWING, _E.TICKET_LOST): (_S.REFUSED, (_F.TICKET_LOST,)),
    (_S.FOLLOWING, _E.ENDED): (_S.GONE, (_F.TICKET_CANCELLED,)),
    (_S.FOLLOWING, _E.ABORTED): (_S.GONE, (_F.TICKET_CANCELLED,)),
    (_S.PIECES, _E.SETTLED): (_S.PIECES, (_F.ORDER,)),
    (_S.PIECES, _E.HANDED_OFF): (_S.LOADING, (_F.TICKET_HANDED_OFF, _F.ORDER)),
    (_S.PIECES, _E.UNREADABLE): (_S.FAILING, (_F.TICKET_HANDED_OFF, _F.REPORT_FAILED)),
    (_S.PIECES, _E.TICKET_LOST): (_S.FAILING, (_F.TICKET_LOST, _F.REPORT_FAILED)),
    (_S.PIECES, _E.ENDED): (_S.PIECES, ()),
    (_S.PIECES, _E.ABORTED): (_S.PIECES, ()),
    (_S.PIECES, _E.CANCELLED): (_S.LOADING, (_F.TICKET_CANCELLED, _F.CANCEL_READ)),
    (_S.LOADING, _E.LASTS): (_S.LOADING, (_F.CLAIM,)),
    (_S.LOADING, _E.LOADED): (_S.GONE, (_F.RELEASE_UNNOTIFIED,)),
    (_S.LOADING, _E.FAILED): (_S.GONE, (_F.RELEASE_FAILED,)),
    (_S.LOADING, _E.FAILED_TRANSIENT): (_S.RETRYING, ()),
    (_S.LOADING, _E.ENDED): (_S.LOADING, ()),
    (_S.LOADING, _E.ABORTED): (_S.LOADING, ()),
    (_S.RETRYING, _E.LASTS): (_S.RETRYING, (_F.CLAIM,)),
    (_S.RETRYING, _E.BLOCKS): (_S.LOADING, (_F.ORDER,)),
    (_S.RETRYING, _E.UNREADABLE): (_S.FAILING, (_F.REPORT_FAILED, _F.RELEASE_FAILED)),
    (_S.RETRYING, _E.NOTHING_TO_LOAD): (_S.GONE, (_F.RELEASE,)),
    (_S.RETRYING, _E.LOCAL): (_S.LOCAL, (_F.COMPUTE_LOCALLY, _F.RELEASE)),
    (_S.RETRYING, _E.ENDED): (_S.GONE, (_F.RELEASE_UNREAD,)),
    (_S.RETRYING, _E.ABORTED): (_S.GONE, (_F.RELEASE,)),
    (_S.REFUSED, _E.BLOCKS): (_S.FAILING, (_F.REPORT_FAILED,)),
    # Another connector loads it, or the prompt must not read the cache.
    (_S.REFUSED, _E.NOTHING_TO_LOAD): (_S.LOCAL, (_F.COMPUTE_LOCALLY,)),
    (_S.REFUSED, _E.ENDED): (_S.GONE, ()),
    (_S.REFUSED, _E.ABORTED): (_S.GONE, ()),
    (_S.FAILING, _E.FAILED): (_S.GONE, ()),
    (_S.FAILING, _E.ENDED): (_S.FAILING, ()),
    (_S.FAILING, _E.ABORTED): (_S.FAILING, ()),
}
"""The next state, and what is done, for each event that a state can meet."""

# Each step asks for states. Before Python 3.12 a tuple at hand is faster than members of an Enum.
_ENDS = (LoadState.LOCAL, LoadState.GONE)
_MAY_BE_CLAIMED = (LoadState.WAITING, LoadState.LOADING, LoadState.RETRYING)


class End(enum.Enum):
    """How a request has ended before its load has."""

    FINISHED = enum.auto()
    ABORTED = enum.auto()


@dataclass
class Attempt:
    """One read of a load, and what the ranks have reported of it.

    Attributes:
        number: how many reads there were with this one.
        first_tokens: where ranks have not filled blocks from their start, see `WorkerReport`.
        verified_by_board: whether a rank has seen in P's lease board that P holds the blocks, and so has not asked P.
        rank_failed: whether a rank has failed.
    """

    number: int
    first_tokens: dict[int, int] = field(default_factory=dict)
    verified_by_board: bool = False
    rank_failed: bool = False


@dataclass(eq=False)
class Load:
    """A request that is to be loaded from P.

    Attributes:
        request: vLLM's.
        state: see `TABLE`; only `Loads.apply` changes it.
        is_optional: whether this engine prefills the request, and computes what it cannot load.
        min_tokens: fewer tokens than these are computed; 0 unless it is optional.
        remote: what P said of it; None if nothing that can be read.
        refusal: why it cannot be loaded, or is computed here; None otherwise.
        num_tokens: tokens to have afterwards; 0 as long as that is not known.
        is_shared: whether other requests read the same blocks.
        claim: what P holds the blocks for; None if D does not renew it.
        attempt: the last read; None before the first.
        end: how the request has ended meanwhile; None if it has not.
        since: when it was added, or handed off, on the monotonic clock.
        waits_since: when vLLM first asked how much is loaded, since it has no blocks; None before.
        request_id: name of its request.
        reader: random number by which P knows this reader of its blocks.
    """

    request: Request
    state: LoadState = LoadState.NEW
    is_optional: bool = False
    min_tokens: int = 0
    remote: PrefillParams | None = None
    refusal: Failure | None = None
    num_tokens: int = 0
    is_shared: bool = False
    claim: LeaseClaim | None = None
    attempt: Attempt | None = None
    end: End | None = None
    since: float = field(default_factory=time.monotonic)
    waits_since: float | None = None
    reader: int = field(default_factory=random_id)
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        """Note the name of its request."""
        self.request_id = self.request.request_id

    def begin_attempt(self) -> None:
        """Count a read that is about to be ordered."""
        self.attempt = Attempt(1 if self.attempt is None else self.attempt.number + 1)


class Loads:
    """The loads of an engine, by request, and the only place in which they change their state.

    Attributes:
        by_id: loads that have not ended, by request.
        unclaimed: those of them that D may claim, and has not: P knows nothing of them.
        comparing: those of them whose prompts are not compared yet, in the order in which they came.
    """

    def __init__(self) -> None:
        """Start without loads."""
        self.by_id: dict[str, Load] = {}
        self.unclaimed: dict[str, Load] = {}
        self.comparing: dict[str, Load] = {}

    def apply(self, load: Load, event: LoadEvent) -> tuple[LoadEffect, ...]:
        """Move a load on, and return what has to be done about it.

        Raises:
            KeyError: the table has no such event in this state, which is an error of the caller's.
        """
        load.state, effects = TABLE[load.state, event]
        for loads, belongs in (
            (self.by_id, load.state not in _ENDS),
            (self.comparing, load.state is LoadState.COMPARING),
            (self.unclaimed, load.claim is None and load.state in _MAY_BE_CLAIMED),
        ):
            if belongs:
                loads[load.request_id] = load
            else:
                loads.pop(load.request_id, None)
        return effects

    def claimed(self, load: Load, claim: LeaseClaim) -> None:
        """Note that P holds the blocks of a load for this claim."""
        load.claim = claim
        self.unclaimed.pop(load.request_id, None)
