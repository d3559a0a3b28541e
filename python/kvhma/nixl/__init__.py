# SPDX-License-Identifier: Apache-2.0
"""Plans over NIXL: registration, handshake, prepared lists, transfers.

Importing this package does not import NIXL. Making an :class:`Agent` does, and the error says what to install if NIXL
is missing.
"""

from kvhma.nixl.agent import Agent
from kvhma.nixl.blocking import load
from kvhma.nixl.handshake import (
    MAX_HANDSHAKE_BYTES,
    WARM_UP,
    HandshakePayload,
    decode_handshake,
    encode_handshake,
    key_hash,
)
from kvhma.nixl.library import AgentOptions
from kvhma.nixl.peer import Peer
from kvhma.nixl.prepared import PreparedList, PreparedRead
from kvhma.nixl.transfer import Telemetry, TransferHandle

__all__ = [
    "MAX_HANDSHAKE_BYTES",
    "WARM_UP",
    "Agent",
    "AgentOptions",
    "HandshakePayload",
    "Peer",
    "PreparedList",
    "PreparedRead",
    "Telemetry",
    "TransferHandle",
    "decode_handshake",
    "encode_handshake",
    "key_hash",
    "load",
]
