# SPDX-License-Identifier: Apache-2.0
"""What the connector's scheduler and its workers exchange in every step, through vLLM."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

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
from kvhma.vllm.failures import Failure
from kvhma.vllm.wire.lease_board import BoardFile
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import Address, Item, LeaseKey, PrefillParams, Prefix

K = TypeVar("K")
V = TypeVar("V")


class ReadCommand(NamedTuple):
    """A request whose cache is to be read.

    Attributes:
        request_id: D's name of the request.
        remote: P's parameters of the request.
        reader: random number that identifies this reader to P.
        num_tokens: tokens whose cache is there after the load, including those that D had before.
        cached: tokens that D had before.
        spans: D's blocks to fill, for each group.
        piece: whether the load is a piece, which D reads while P computes the prompt. D asks P nothing about a piece,
            and vLLM does not learn of it.
        held: of a last piece, D's blocks that it and earlier pieces fill; empty without earlier pieces.
        extras: what options add, by option.
        outcome: of the release that goes to P with the question after the read. None if several ranks read: then the
            scheduler releases the blocks when all have read.
        optional: whether D falls back to local prefill if the load fails.
    """

    request_id: str
    remote: PrefillParams
    reader: int
    num_tokens: int
    cached: int
    spans: tuple[Span, ...]
    outcome: Outcome | None
    optional: bool = False
    piece: bool = False
    held: tuple[Span, ...] = ()
    extras: Mapping[str, Any] = MappingProxyType({})

    def with_extra(self, option: str, value: Any) -> ReadCommand:
        """Return the command with what an option adds."""
        return self._replace(extras={**self.extras, option: value})


class DigestOrder(NamedTuple):
    """A finished request whose blocks P's workers sum, for their readers.

    Attributes:
        key: identifies it to its readers.
        seed: of the digest.
        num_tokens: tokens that the blocks hold.
        spans: the blocks of each group.
    """

    key: LeaseKey
    seed: int
    num_tokens: int
    spans: tuple[Span, ...]


def join_ranks(first: tuple[ContentDigest, int], second: tuple[ContentDigest, int]) -> tuple[ContentDigest, int]:
    """Add the digests of two sets of ranks. It must not raise, because it runs in vLLM's own thread.

    Digests of different requests cannot be added. Then the second set stays missing, and D's wait for it times out.
    """
    with contextlib.suppress(KvhmaError):
        return first[0] + second[0], first[1] + second[1]
    return first


class LoadDigest(NamedTuple):
    """The content digests of a load: of P's blocks, and of what D has read.

    Attributes:
        seed: of both digests.
        prefill: the sum over P's ranks.
        decode: the sum over `ranks` ranks of D.
        ranks: number of D's ranks that have reported.
    """

    seed: int
    prefill: ContentDigest
    decode: ContentDigest
    ranks: int = 1

    def joined(self, more: LoadDigest) -> LoadDigest:
        """Add the digests of more ranks. If they cannot be added, the sum is empty, and the load fails."""
        try:
            decode = self.decode + more.decode
        except KvhmaError:
            decode = ContentDigest(self.decode.num_tokens, 1, {}, {})
        return self._replace(decode=decode, ranks=self.ranks + more.ranks)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to its workers.

    Attributes:
        loads: requests to read.
        refusals: requests that cannot be read, with the reason; the workers report them as failed.
        cancelled: requests that ended before they were completely read. Workers read nothing of them any more.
        copy_to_host: blocks to copy to host memory after this step, and the slots to copy them to: for each request, a
            span for each group.
        idle: whether this step computes nothing.
        step: number of the step, which the workers return with its results; None if the scheduler does not need it.
        digests: finished requests whose blocks the workers sum.
        verdicts: loads whose digest every rank has reported: the failure of each, or None.
        extras: what options add, by option.
    """

    loads: list[ReadCommand] = field(default_factory=list)
    refusals: dict[str, Failure] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    copy_to_host: list[tuple[tuple[Span, ...], tuple[Span, ...]]] = field(default_factory=list)
    idle: bool = False
    step: int | None = None
    digests: list[DigestOrder] = field(default_factory=list)
    verdicts: dict[str, Failure | None] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without names of fields and classes: every worker waits for this object in every step."""
        loads, *fields = vars(self).values()
        packed = msgspec.msgpack.encode([load[:-1] for load in loads], enc_hook=_packed) if loads else b""
        return _step, (packed, {index: dict(load.extras) for index, load in enumerate(loads) if load.extras}, *fields)


def _step(packed: bytes, extras: Mapping[int, Mapping[str, Any]], *fields: Any) -> StepMetadata:
    loads = [_load(row) for row in msgspec.msgpack.decode(packed)] if packed else []
    for index, of_load in extras.items():
        loads[index] = loads[index]._replace(extras=of_load)
    return StepMetadata(loads, *fields)


def _load(row: Sequence[Any]) -> ReadCommand:
    """Return the load that was packed as `row`, in which named tuples are lists and arrays are bytes."""
    load, remote = ReadCommand(*row), PrefillParams(*row[ReadCommand._fields.index("remote")])
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
        held=_spans(load.held),
    )


def _packed(value: Any) -> bytes | int:
    """Encode what msgspec does not know: an array of ids as bytes, a number of numpy's as Python's."""
    return np.asarray(value, np.int64).tobytes() if value.ndim else int(value)


def _spans(rows: Sequence[Any]) -> tuple[Span, ...]:
    return tuple(Span(first, np.frombuffer(ids, np.int64) if isinstance(ids, bytes) else ids) for first, ids in rows)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers to their scheduler, by D's name of the request.

    Attributes:
        failures: loads that failed.
        first_tokens: the first filled token of groups whose first block is only partly filled, for loads that are done;
            by index of the transferred group.
        pieces: number of ranks that have read their piece of a request.
        lost_pieces: requests of which a rank could not read its piece, with the reason.
        step: number of the step whose results come with the report; None without a number.
        verified_by_board: loads that are done and whose blocks P's board has verified. P was not notified of them.
        digests: of loads that are done but for the scheduler's verdict on their content.
        prefill_digests: of finished requests: the sum, and over how many ranks.
        extras: what options add, by option. A value has ``joined(more)``, which returns it with that of another rank.
    """

    failures: dict[str, Failure] = field(default_factory=dict)
    first_tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    lost_pieces: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    verified_by_board: set[str] = field(default_factory=set)

    digests: dict[str, LoadDigest] = field(default_factory=dict)
    prefill_digests: dict[LeaseKey, tuple[ContentDigest, int]] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as :class:`StepMetadata` is."""
        return WorkerReport, tuple(vars(self).values())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        reported = (
            self.failures
            or self.first_tokens
            or self.pieces
            or self.verified_by_board
            or self.digests
            or self.prefill_digests
            or self.extras
        )
        return not reported and self.step is None

    def aggregate(self, report: KVConnectorWorkerMetadata) -> WorkerReport:
        """Join the reports of two workers. A permanent failure wins over a transient one, a later first token too."""
        if not isinstance(report, WorkerReport):
            return self
        return WorkerReport(
            failures=_merge(
                self.failures, report.failures, lambda known, failure: failure if known.transient else known
            ),
            first_tokens={
                name: merge_first_tokens(self.first_tokens.get(name, {}), report.first_tokens.get(name, {}))
                for name in self.first_tokens.keys() | report.first_tokens.keys()
            },
            pieces=_merge(self.pieces, report.pieces, operator.add),
            lost_pieces=self.lost_pieces | report.lost_pieces,
            step=report.step if self.step is None else self.step,  # all ranks report the same step
            verified_by_board=self.verified_by_board | report.verified_by_board,
            digests=_merge(self.digests, report.digests, LoadDigest.joined),
            prefill_digests=_merge(self.prefill_digests, report.prefill_digests, join_ranks),
            extras=_merge(self.extras, report.extras, lambda known, more: known.joined(more)),
        )


def _merge(first: Mapping[K, V], second: Mapping[K, V], join: Callable[[V, V], V]) -> dict[K, V]:
    """Return the entries of both mappings; `join` makes one value of two with the same key."""
    return {**first, **{key: join(first[key], value) if key in first else value for key, value in second.items()}}


def merge_first_tokens(first: Mapping[int, int], second: Mapping[int, int]) -> dict[int, int]:
    """Return the first tokens by group that hold for two ranks: the later token of each group."""
    return {group: max(first.get(group, 0), second.get(group, 0)) for group in first.keys() | second.keys()}


@dataclass
class LocalWorkerIdentity(KVConnectorHandshakeMetadata):
    """A worker's identity, for the listener in its scheduler's process.

    Attributes:
        data: the worker's message of :mod:`kvhma.nixl.handshake`.
        private_key: Ed25519 key, 32 bytes, that signs `data` for each peer. It never leaves the engine.
        board: the lease board that the scheduler writes to; None without a board.
    """

    data: bytes
    private_key: bytes = field(repr=False)
    board: BoardFile | None = None
