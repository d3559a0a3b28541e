# SPDX-License-Identifier: Apache-2.0
"""What the connector's scheduler and its workers exchange in every step, through vLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvhma.digests import ContentDigest
from kvhma.errors import KvhmaError
from kvhma.geometry import Span
from kvhma.vllm.tracing import Trace
from kvhma.vllm.wire.lease_board import BoardFile
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import Address, Item, LeaseKey, PrefillParams, Prefix


class Load(NamedTuple):
    """A request whose cache is to be read.

    Attributes:
        request_id: D's name of the request.
        remote: what P said about it.
        reader: random number by which P knows this reader of its blocks.
        num_tokens: tokens whose cache is there afterwards, those that D had already included.
        cached: tokens that D had already.
        spans: D's blocks to fill, for each group.
        piece: whether it is one of several, which are read while P computes the prompt: nothing is asked of P then, and
            vLLM hears nothing of it.
        held: of a last piece, D's blocks to fill with those of earlier pieces; empty without.
        outcome: how P is told, with the question after the read, that the blocks are not needed any more; None where
            several ranks read, so that the scheduler tells it when all have.
        optional: whether the request is computed here if it fails.
        trace: of the request; None if it is not traced.
    """

    request_id: str
    remote: PrefillParams
    reader: int
    num_tokens: int
    cached: int
    spans: tuple[Span, ...]
    outcome: Outcome | None
    trace: Trace | None = None
    optional: bool = False
    piece: bool = False
    held: tuple[Span, ...] = ()


class DigestOrder(NamedTuple):
    """A finished request whose blocks are to be summed, for who reads them.

    Attributes:
        key: names it to its readers.
        seed: of the digest.
        num_tokens: tokens that the blocks hold.
        spans: the blocks of each group.
    """

    key: LeaseKey
    seed: int
    num_tokens: int
    spans: tuple[Span, ...]


def join_ranks(one: tuple[ContentDigest, int], other: tuple[ContentDigest, int]) -> tuple[ContentDigest, int]:
    """Add the digests of some ranks and of some others; raises nothing, since it runs in vLLM's own thread.

    Those that cannot be added are not of one request: then ranks stay missing, and who waits for them gives up.
    """
    with contextlib.suppress(KvhmaError):
        return one[0] + other[0], one[1] + other[1]
    return one


class LoadDigest(NamedTuple):
    """What a load has, and what P says that it holds.

    Attributes:
        seed: of both.
        prefill: the sum of P's ranks.
        decode: the sum of `ranks` ranks of D.
        ranks: how many of them have said.
    """

    seed: int
    prefill: ContentDigest
    decode: ContentDigest
    ranks: int = 1

    def joined(self, other: LoadDigest) -> LoadDigest:
        """Add what other ranks have. Sums that cannot be added are of nothing, so that no load is right by them."""
        try:
            decode = self.decode + other.decode
        except KvhmaError:
            decode = ContentDigest(self.decode.num_tokens, {})
        return self._replace(decode=decode, ranks=self.ranks + other.ranks)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to its workers.

    Attributes:
        loads: requests to read.
        refusals: requests that cannot be read, and why; the workers report them as failed.
        given_up: requests that have ended before all of them was read, and of which nothing is read any more.
        copy_to_host: blocks to copy to host memory after this step, and the slots to copy them to: for each request, a
            span for each group.
        idle: whether nothing is computed in this step.
        step: number of the step, for the workers to send back with its results; None if nobody asks.
        digests: finished requests whose blocks are to be summed.
        verdicts: loads whose digest every rank has reported, and why each of them fails; None for those that do not.
    """

    loads: list[Load] = field(default_factory=list)
    refusals: dict[str, Failure] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    copy_to_host: list[tuple[tuple[Span, ...], tuple[Span, ...]]] = field(default_factory=list)
    idle: bool = False
    step: int | None = None
    digests: list[DigestOrder] = field(default_factory=list)
    verdicts: dict[str, Failure | None] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without names of fields and classes: a worker gets one in every step, and waits for it."""
        loads, *others = vars(self).values()
        packed = msgspec.msgpack.encode(loads, enc_hook=_packed) if loads else b""
        return _step, (packed, *others)


def _step(loads: bytes, *others: Any) -> StepMetadata:
    return StepMetadata([_load(row) for row in msgspec.msgpack.decode(loads)] if loads else [], *others)


def _load(row: Sequence[Any]) -> Load:
    """Return what `row` was before it was packed: every tuple with a name is a list in it, and arrays are bytes."""
    load, remote = Load(*row), PrefillParams(*row[Load._fields.index("remote")])
    return load._replace(
        remote=remote._replace(
            address=Address(*remote.address),
            lease_key=LeaseKey(*remote.lease_key),
            spans=_spans(remote.spans),
            prefixes=tuple(Prefix(*prefix) for prefix in remote.prefixes),
            items=tuple(Item(*item) for item in remote.items),
        ),
        spans=_spans(load.spans),
        outcome=None if load.outcome is None else Outcome(load.outcome),
        trace=None if load.trace is None else Trace(*load.trace),
        held=_spans(load.held),
    )


def _packed(value: Any) -> bytes | int:
    """Return an array of ids as bytes, and a number of numpy's as Python's: msgspec asks for what it does not know."""
    return np.asarray(value, np.int64).tobytes() if value.ndim else int(value)


def _spans(rows: Sequence[Any]) -> tuple[Span, ...]:
    return tuple(Span(first, np.frombuffer(ids, np.int64) if isinstance(ids, bytes) else ids) for first, ids in rows)


CLIENTS_CAUSES = ("refused", "other_prompt", "state_ahead", "late_reader", "no_room")
"""Causes that the scheduler finds in what clients and proxies send: anybody may have them logged."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a load failed.

    Attributes:
        cause: one of `CLIENTS_CAUSES`, ``handshake``, ``unsupported``, ``request``, ``transfer``, ``peer_lost``,
            ``expired``, ``digest``, ``internal``.
        text: one line.
        passing: whether it may pass, so that the load is tried again.
        optional: whether the load is; vLLM hears nothing of its failure.
    """

    cause: str
    text: str
    passing: bool
    optional: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers to their scheduler, by D's name of the request.

    Attributes:
        failures: loads that failed.
        first_tokens: of loads that are done, for groups whose first block is not filled from its start: the first token
            from which on they are, by index of the group among those that take part.
        pieces: how many ranks have read the piece of a request that they were ordered to.
        lost_pieces: requests of which a rank could not read its piece, and why.
        step: number of the step whose results come with the report; None if it has none.
        shown: loads that are done and of which P has not heard: its board has shown that it held them.
        digests: of loads that are done but for the scheduler's word on what they hold.
        prefill_digests: of finished requests, the sum of so many ranks.
    """

    failures: dict[str, Failure] = field(default_factory=dict)
    first_tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    lost_pieces: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    shown: set[str] = field(default_factory=set)

    digests: dict[str, LoadDigest] = field(default_factory=dict)
    prefill_digests: dict[LeaseKey, tuple[ContentDigest, int]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as :class:`StepMetadata` is."""
        return WorkerReport, tuple(vars(self).values())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        said = self.failures or self.first_tokens or self.pieces or self.shown or self.digests or self.prefill_digests
        return not said and self.step is None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Join the reports of two workers: of two failures the lasting one counts, of two first tokens the later."""
        failures, first_tokens = dict(self.failures), dict(self.first_tokens)
        pieces, lost_pieces, step = dict(self.pieces), dict(self.lost_pieces), self.step
        shown, digests, prefill_digests = set(self.shown), dict(self.digests), dict(self.prefill_digests)
        if isinstance(other, WorkerReport):
            for request_id, ranks in other.pieces.items():
                pieces[request_id] = pieces.get(request_id, 0) + ranks
            lost_pieces |= other.lost_pieces
            shown |= other.shown
            step = other.step if step is None else step  # all ranks report the same step
            for request_id, failure in other.failures.items():
                known = failures.get(request_id)
                if known is None or known.passing:
                    failures[request_id] = failure
            for request_id, tokens in other.first_tokens.items():
                first_tokens[request_id] = later(first_tokens.get(request_id, {}), tokens)
            for request_id, digest in other.digests.items():
                digests[request_id] = digests[request_id].joined(digest) if request_id in digests else digest
            for key, sums in other.prefill_digests.items():
                prefill_digests[key] = join_ranks(prefill_digests[key], sums) if key in prefill_digests else sums
        return WorkerReport(failures, first_tokens, pieces, lost_pieces, step, shown, digests, prefill_digests)


def later(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """Return the first tokens by group that hold for two ranks: the later one of each group."""
    return {group: max(one.get(group, 0), other.get(group, 0)) for group in one.keys() | other.keys()}


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """What the listener in a worker's scheduler's process has to know of the worker.

    Attributes:
        data: the worker's message of :mod:`kvhma.nixl.handshake`.
        private_key: Ed25519 key, 32 bytes, that signs it for who asks. It never leaves the engine.
        board: where the scheduler shows what is held; None for nowhere.
    """

    data: bytes
    private_key: bytes = field(repr=False)
    board: BoardFile | None = None
