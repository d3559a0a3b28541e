# SPDX-License-Identifier: Apache-2.0
"""A connected agent, and how NIXL adds and removes it."""

from __future__ import annotations

import contextlib
from collections.abc import Container
from dataclasses import dataclass, field

from kvhma.errors import HandshakeError, KvhmaError
from kvhma.geometry import Geometry
from kvhma.nixl.arrays import row_of
from kvhma.nixl.handshake import HandshakePayload
from kvhma.nixl.library import NixlAgent, make_descriptors, translate
from kvhma.nixl.window import ReadWindow


@dataclass(eq=False)
class Peer:
    """A connected agent whose memory can be read.

    Valid until it is lost, disconnected, or replaced by another handshake payload with the same name.

    Attributes:
        name: name of its agent.
        geometry: its caches.
        payload: the fields of its handshake payload, including its incarnation and its engine's extra bytes.
        gone: why it can no longer be read; None while it is connected.
        is_warm: whether the connection is set up, from a first read on.
        window: bounds the bytes in flight from it. None if the transport does not need that, which a warm peer shows.
    """

    name: str
    geometry: Geometry = field(repr=False)
    payload: HandshakePayload = field(repr=False)
    gone: str | None = None
    is_warm: bool = False
    window: ReadWindow | None = field(default_factory=ReadWindow, repr=False)


def metadata_start(name: str) -> bytes:
    """Return the first bytes of NIXL's metadata of an agent with this name.

    ::

        nixlSerDes | Agent | u64, bytes of the name, little-endian | name | "|"
    """
    raw = name.encode()
    return b"nixlSerDes|Agent" + len(raw).to_bytes(8, "little") + raw + b"|"


def add_peer(nixl: NixlAgent, payload: HandshakePayload, connected: Container[str], *, check_start: bool) -> Peer:
    """Add the sender of a handshake payload to NIXL, and check that its NIXL metadata agrees with the payload.

    Args:
        nixl: the NIXL agent that adds it.
        payload: the fields of the sender's handshake payload.
        connected: names of the connected peers, which a wrong payload must not remove.
        check_start: whether the metadata must start with :func:`metadata_start`.

    Raises:
        HandshakeError: NIXL refuses the metadata, or the metadata has another agent's name or does not cover the
            geometry.
        PeerLostError: the peer is already gone.
        TransferError: NIXL failed otherwise.
    """
    name = payload.name
    # NIXL merges metadata into the agent that the metadata names, so a peer could add to another agent's entry.
    if check_start and not payload.metadata.startswith(metadata_start(name)):
        raise HandshakeError(f"the metadata in the handshake payload of {name!r} is not that agent's")
    try:
        added = nixl.add_remote_agent(payload.metadata)
    except Exception as exc:
        raise translate(exc, f"NIXL cannot add {name!r}", HandshakeError) from exc
    loaded = added.decode(errors="replace") if isinstance(added, bytes) else added
    try:
        if loaded != name:
            raise HandshakeError(f"the metadata in the handshake payload of {name!r} is of agent {loaded!r}")
        for region in payload.geometry.regions:
            if not nixl.check_remote_metadata(loaded, make_descriptors(nixl, row_of(region), region.memory)):
                raise HandshakeError(f"{name!r} did not register {region}")
    except Exception as exc:
        if loaded not in connected:
            with contextlib.suppress(Exception):
                nixl.remove_remote_agent(loaded)
        if isinstance(exc, KvhmaError):
            raise
        raise translate(exc, f"cannot connect to {name!r}", HandshakeError) from exc
    return Peer(name, payload.geometry, payload)


def remove_peer(nixl: NixlAgent, peer: Peer) -> None:
    """Remove a peer without transfers from NIXL.

    Raises:
        TransferError: NIXL cannot remove it.
    """
    try:
        nixl.remove_remote_agent(peer.name)
    except Exception as exc:
        # Newer versions of NIXL remove an agent themselves when a transfer finds it disconnected.
        if type(exc).__name__ != "nixlNotFoundError":
            raise translate(exc, f"cannot remove peer {peer.name!r}") from exc
