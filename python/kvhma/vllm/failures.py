# SPDX-License-Identifier: Apache-2.0
"""Why a load failed, in words and as a label of metrics."""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass

from kvhma.errors import (
    DigestError,
    HandshakeError,
    HandshakeTimeoutError,
    KvhmaError,
    LeaseEndedError,
    LeaseUnknownError,
    PeerLostError,
    TransferError,
    UnsupportedPairError,
)
from kvhma.text import one_line

logger = logging.getLogger("vllm.kvhma")

CLIENTS_CAUSES = ("refused", "other_prompt", "state_ahead", "late_reader", "no_room")
"""Causes that clients and proxies can provoke, so any client can fill the log with them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a load failed.

    Attributes:
        cause: one of `CLIENTS_CAUSES`, ``handshake``, ``unsupported``, ``request``, ``transfer``, ``peer_lost``,
            ``expired``, ``digest``, ``internal``.
        text: one line.
        transient: whether a retry may succeed.
        optional: whether the load is optional. Then vLLM does not learn of its failure.
    """

    cause: str
    text: str
    transient: bool
    optional: bool = False


_CAUSES: tuple[tuple[type[KvhmaError], str, bool], ...] = (
    (DigestError, "digest", True),
    (LeaseUnknownError, "expired", True),
    (LeaseEndedError, "expired", False),
    (PeerLostError, "peer_lost", True),
    (HandshakeTimeoutError, "handshake", True),
    (HandshakeError, "handshake", False),
    (UnsupportedPairError, "unsupported", False),
    (TransferError, "transfer", True),
    (KvhmaError, "request", False),
)
"""The cause of each error, and whether it is transient. The first match counts."""


def refused(text: str) -> Failure:
    """Return the failure of a request that this engine refuses to load."""
    return Failure("refused", text, transient=False)


def failure_of(error: BaseException) -> Failure:
    """Return the failure of a load that raised this error."""
    for kind, cause, transient in _CAUSES:
        if isinstance(error, kind):
            return Failure(cause, str(error), transient)
    logger.error("kvhma: internal error during a load", exc_info=error)
    # Formatting the error must not raise.
    text = traceback.format_exception_only(type(error), error)[-1]
    return Failure("internal", one_line(text.rstrip()), transient=False)
