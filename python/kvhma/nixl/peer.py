# SPDX-License-Identifier: Apache-2.0
"""A connected agent, and how NIXL is told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Container
from dataclasses import dataclass, field

from kvhma.errors import HandshakeError, KvhmaError
from kvhma.geometry import Geometry
from kvhma.nixl.arrays import row_of
from kvhma.nixl.handshake import Hello
from kvhma.nixl.library import NixlAgent, make_descriptors, translate


@dataclass(eq=False)
class Peer:
    """A connected agent whose memory can be read.

    Valid until it is lost, disconnected, or replaced by another hello of the same name.

    Attributes:
        name: name of its agent.
        generation: random number of this incarnation of the agent; after a restart the same name has another one.
        geometry: its caches.
        extra: bytes its engine put into the hello.
        gone: why nothing can be read from it any more; None while it is connected.
        hello: the message it was connected by.
    """

    name: str
    generation: int
    geometry: Geometry = field(repr=False)
    extra: bytes = field(repr=False)
    hello: Hello = field(repr=False)
    gone: str | None = None


def metadata_start(name: str) -> bytes:
    """Return the bytes that NIXL's metadata of an agent of this name starts with.

    ::

        nixlSerDes | Agent | u64, bytes of the name, little-endian | name | "|"
    """
    raw = name.encode()
    return b"nixlSerDes|Agent" + len(raw).to_bytes(8, "little") + raw + b"|"


def add_peer(nixl: NixlAgent, hello: Hello, connected: Container[str], *, check_start: bool) -> Peer:
    """Tell NIXL of the sender of a hello, and check that NIXL finds in its metadata what the hello says.

    Args:
        nixl: who is told.
        hello: what the sender said.
        connected: names of the connected peers, none of which a bad hello may remove.
        check_start: whether the metadata has to start like :func:`metadata_start`.

    Raises:
        HandshakeError: NIXL refuses the metadata, or it is of another agent, or does not cover the geometry.
        PeerLostError: the peer is gone already.
        TransferError: NIXL failed otherwise.
    """
    name = hello.name
    # NIXL merges metadata into whichever agent it names, so a peer could add to what is known of another one.
    if check_start and not hello.metadata.startswith(metadata_start(name)):
        raise HandshakeError(f"the metadata in the hello of {name!r} is not that agent's")
    try:
        added = nixl.add_remote_agent(hello.metadata)
    except Exception as exc:
        raise translate(exc, f"NIXL cannot take on {name!r}", HandshakeError) from exc
    loaded = added.decode(errors="replace") if isinstance(added, bytes) else added
    try:
        _check_loaded(nixl, hello, loaded)
    except Exception as exc:
        if loaded not in connected:
            with contextlib.suppress(Exception):
                nixl.remove_remote_agent(loaded)
        if isinstance(exc, KvhmaError):
            raise
        raise translate(exc, f"cannot connect to {name!r}", HandshakeError) from exc
    return Peer(name, hello.generation, hello.geometry, hello.extra, hello)


def _check_loaded(nixl: NixlAgent, hello: Hello, loaded: str) -> None:
    if loaded != hello.name:
        raise HandshakeError(f"the metadata in the hello of {hello.name!r} is of agent {loaded!r}")
    for region in hello.geometry.regions:
        if not nixl.check_remote_metadata(loaded, make_descriptors(nixl, row_of(region), region.memory)):
            raise HandshakeError(f"{hello.name!r} did not register {region}")
