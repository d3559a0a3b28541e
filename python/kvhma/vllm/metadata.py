# SPDX-License-Identifier: Apache-2.0
"""What the connector's scheduler and its workers exchange in every step, through vLLM."""

from __future__ import annotations

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


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to its workers.

    Attributes:
        loads: requests to read.
        refusals: requests that cannot be read, with the reason; the workers report them as failed.
        cancelled: requests that ended before they were completely read. Workers read nothing of them any more.
        idle: whether this step computes nothing.
        extras: what options add, by option.
    """

    loads: list[ReadCommand] = field(default_factory=list)
    refusals: dict[str, Failure] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    idle: bool = False
    extras: dict[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without names of fields and classes: every worker waits for this object in every step."""
        loads, *fields = vars(self).values()
        packed = msgspec.msgpack.encode([load[:-1] for load in loads], enc_hook=_packed) if loads else b""
        return _step, (packed, {index: dict(load.extras) for index, load in enumerate(loads) if load.extras}, *fields)


NOTHING, NOTHING_IDLE = StepMetadata(), StepMetadata(idle=True)
"""Of steps that tell the workers nothing, as most do. Neither scheduler nor workers change these two."""


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
        verified_by_board: loads that are done and whose blocks P's board has verified. P was not notified of them.
        extras: what options add, by option. A value has ``joined(more)``, which returns it with that of another rank.
    """

    failures: dict[str, Failure] = field(default_factory=dict)
    first_tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    lost_pieces: dict[str, str] = field(default_factory=dict)
    verified_by_board: set[str] = field(default_factory=set)
    extras: dict[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as :class:`StepMetadata` is."""
        return WorkerReport, tuple(vars(self).values())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        reported = self.failures or self.first_tokens or self.pieces or self.verified_by_board or self.extras
        return not reported

    def aggregate(self, report: KVConnectorWorkerMetadata) -> WorkerReport:
        """Join the reports of two workers. A permanent failure wins over a transient one, a later first token too."""
        if not isinstance(report, WorkerReport):
            return self
        return WorkerReport(
            failures=merged(
                self.failures, report.failures, lambda known, failure: failure if known.transient else known
            ),
            first_tokens={
                name: merge_first_tokens(self.first_tokens.get(name, {}), report.first_tokens.get(name, {}))
                for name in self.first_tokens.keys() | report.first_tokens.keys()
            },
            pieces=merged(self.pieces, report.pieces, operator.add),
            lost_pieces=self.lost_pieces | report.lost_pieces,
            verified_by_board=self.verified_by_board | report.verified_by_board,
            extras=merged(self.extras, report.extras, lambda known, more: known.joined(more)),
        )


def merged(first: Mapping[K, V], second: Mapping[K, V], join: Callable[[V, V], V]) -> dict[K, V]:
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
