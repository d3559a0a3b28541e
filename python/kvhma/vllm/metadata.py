# SPDX-License-Identifier: Apache-2.0
"""What the two halves of the connector tell each other in every step, through vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvhma.geometry import Span
from kvhma.vllm.params import Remote


@dataclass(frozen=True, slots=True)
class Load:
    """A request whose cache is to be read.

    Attributes:
        request_id: D's name of the request.
        remote: what P said of it.
        reader: random number by which P knows this reader of its blocks.
        num_tokens: tokens whose cache is there afterwards, those that D had already included.
        cached: tokens that D had already.
        spans: D's blocks to fill, for each group.
    """

    request_id: str
    remote: Remote
    reader: int
    num_tokens: int
    cached: int
    spans: tuple[Span, ...]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to its workers.

    Attributes:
        loads: requests to read.
        refusals: requests that cannot be read, and why; the workers report them as failed.
        sent: requests whose blocks nobody wants any more, to be reported as sent.
        stage: blocks to copy to host memory after this step, for each group.
        idle: whether nothing is computed in this step.
    """

    loads: list[Load] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    stage: list[tuple[Span, ...]] = field(default_factory=list)
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a load failed.

    Attributes:
        cause: one of ``refused``, ``handshake``, ``unsupported``, ``request``, ``transfer``, ``peer_lost``,
            ``expired``, ``internal``.
        text: one line.
        passing: whether another try may end otherwise.
    """

    cause: str
    text: str
    passing: bool


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers to their scheduler: loads that failed, by D's name of the request."""

    failures: dict[str, Failure] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Join the reports of two workers; of two failures the lasting one counts."""
        failures = dict(self.failures)
        if isinstance(other, WorkerReport):
            for request_id, failure in other.failures.items():
                known = failures.get(request_id)
                if known is None or known.passing:
                    failures[request_id] = failure
        return WorkerReport(failures)


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """A worker's message of :mod:`kvhma.nixl.handshake`, for the listener in its scheduler's process."""

    data: bytes
