# SPDX-License-Identifier: Apache-2.0
"""The message with which a worker introduces itself to another worker: a versioned, bounded, checked binary envelope.

Layout, little-endian, no padding::

     0 | 8 s  | magic "kvhma-hi"
     8 | u16  | version
    10 | u16  | bytes of the name
    12 | u32  | bytes of the agent's metadata
    16 | u32  | bytes of the geometry (the JSON form of docs/geometry.md)
    20 | u32  | bytes of extra
    24 | u64  | incarnation
    32 | 32 s | public key of the agent; zeros without a key
    64 | 16 s | BLAKE2b of everything above and below
    80 |      | name, metadata, geometry, extra

The digest is not a signature. It protects NIXL, which passes the metadata to the transport unchecked, from damaged
bytes. The name of an agent with a key ends in a hash of the key, so only its owner can sign with that name. The engines
decide who signs what and who checks it.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from kvhma.errors import HandshakeError, KvhmaError
from kvhma.geometry import Geometry

VERSION = 2
"""Version of the envelope."""

WARM_UP = b"kvhma:warm-up"
"""The notification that only opens the connection; the receiver ignores it."""

MAX_NAME_BYTES = 256
MAX_METADATA_BYTES = 16 << 20
MAX_GEOMETRY_BYTES = 16 << 20
MAX_EXTRA_BYTES = 512 << 10
KEY_BYTES = 32
"""Bytes of a public key (Ed25519)."""

_MAGIC = b"kvhma-hi"
_START = struct.Struct("<8sH")
_HEAD = struct.Struct("<8sHHIIIQ32s")
_DIGEST_BYTES = 16
_BODY = _HEAD.size + _DIGEST_BYTES

MAX_HANDSHAKE_BYTES = _BODY + MAX_NAME_BYTES + MAX_METADATA_BYTES + MAX_GEOMETRY_BYTES + MAX_EXTRA_BYTES
"""Limit for a handshake payload; a receiver need not read more."""


@dataclass(frozen=True, slots=True)
class HandshakePayload:
    """The fields of a handshake payload.

    Attributes:
        name: name of its NIXL agent.
        incarnation: random number of 64 bits; an agent that restarts under the same name gets another number.
        metadata: NIXL's blob of the agent: how to reach it, and which memory it registered.
        geometry: the worker's caches.
        extra: bytes for the engine's own use, for example its clock and protocol version.
        public_key: the agent's key; its name ends in :func:`key_hash` of the key. Empty without a key.
    """

    name: str
    incarnation: int
    metadata: bytes = field(repr=False)
    geometry: Geometry = field(repr=False)
    extra: bytes = field(default=b"", repr=False)
    public_key: bytes = field(default=b"", repr=False)


def key_hash(public_key: bytes) -> str:
    """Return the end of the name of an agent with this key: 32 hexadecimal digits.

    Args:
        public_key: the bytes of the key.
    """
    return hashlib.blake2b(public_key, digest_size=16, person=b"kvhma agent").hexdigest()


def encode_handshake(
    agent_metadata: bytes,
    geometry: Geometry,
    *,
    name: str,
    incarnation: int,
    extra: bytes = b"",
    public_key: bytes = b"",
) -> bytes:
    """Return the message for a :class:`HandshakePayload` of these fields.

    Args:
        agent_metadata: NIXL's metadata.
        geometry: geometry of the registered caches.
        name: name of the agent.
        incarnation: a random number; a restarted agent gets another one.
        extra: bytes for the engine's own use.
        public_key: the key whose hash ends the name; empty without a key.

    Raises:
        HandshakeError: a field exceeds its bound, or the name does not end in the hash of the key.
    """
    raw_name = name.encode(errors="surrogatepass")
    body = (raw_name, bytes(agent_metadata), geometry.to_json(), bytes(extra))
    sizes = [len(part) for part in body]
    _check_sizes(sizes)
    _check_key(_check_name(raw_name), public_key)
    if not 0 <= incarnation < 1 << 64:
        raise HandshakeError(f"incarnation {incarnation} does not fit 64 bits")
    head = _HEAD.pack(_MAGIC, VERSION, *sizes, incarnation, public_key)
    joined = b"".join(body)
    return head + _digest(head, joined) + joined


def decode_handshake(data: bytes) -> HandshakePayload:
    """Read a message of :func:`encode_handshake`. Safe on any input.

    Nothing is copied or parsed before sizes, version and digest are checked.

    Args:
        data: the message.

    Returns:
        Its fields.

    Raises:
        HandshakeError: the message has another form or version, is too long or damaged, has a name that does not fit
            its key, or an invalid geometry. No other error is raised.
    """
    view = _as_bytes(data)
    sizes, incarnation, public_key = _read_head(view)
    if len(view) != _BODY + sum(sizes):
        raise HandshakeError(f"a handshake payload of {len(view)} bytes, its header says {_BODY + sum(sizes)}")
    if _digest(view[: _HEAD.size], view[_BODY:]) != bytes(view[_HEAD.size : _BODY]):
        raise HandshakeError("the handshake payload is damaged: its digest differs")
    ends = list(accumulate(sizes, initial=_BODY))
    raw_name, metadata, raw_geometry, extra = (bytes(view[start:end]) for start, end in pairwise(ends))
    name = _check_name(raw_name)
    _check_key(name, public_key)
    try:
        geometry = Geometry.from_json(raw_geometry)
    except KvhmaError as exc:
        raise HandshakeError(f"the geometry of {name!r}: {exc}") from exc
    return HandshakePayload(name, incarnation, metadata, geometry, extra, public_key)


def _as_bytes(data: object) -> memoryview:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise HandshakeError(f"a handshake payload is bytes, not {type(data).__name__}")
    view = memoryview(data)
    if view.ndim != 1 or view.itemsize != 1 or not view.contiguous:
        raise HandshakeError("a handshake payload is one run of bytes")
    return view


def _read_head(view: memoryview) -> tuple[list[int], int, bytes]:
    """Return the sizes of the four parts of the body, within their bounds, the incarnation, and the public key."""
    if len(view) > MAX_HANDSHAKE_BYTES:
        raise HandshakeError(f"a handshake payload of {len(view)} bytes, at most {MAX_HANDSHAKE_BYTES} are read")
    if len(view) < _START.size:
        raise HandshakeError(f"a handshake payload of {len(view)} bytes is cut off")
    magic, version = _START.unpack_from(view)
    if magic != _MAGIC:
        raise HandshakeError("not a kvhma handshake payload")
    if version != VERSION:  # check it first: another version may have another header
        raise HandshakeError(f"the peer speaks version {version} of the handshake, this side version {VERSION}")
    if len(view) < _BODY:
        raise HandshakeError(f"a handshake payload of {len(view)} bytes is cut off")
    *sizes, incarnation, public_key = _HEAD.unpack_from(view)[2:]
    _check_sizes(sizes)
    return sizes, incarnation, public_key if any(public_key) else b""


def _digest(head: bytes | memoryview, body: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES)
    digest.update(body)
    return digest.digest()


def _check_sizes(sizes: list[int]) -> None:
    bounds = (MAX_NAME_BYTES, MAX_METADATA_BYTES, MAX_GEOMETRY_BYTES, MAX_EXTRA_BYTES)
    for what, size, bound in zip(("name", "metadata", "geometry", "extra"), sizes, bounds, strict=True):
        if size > bound:
            raise HandshakeError(f"{what} of {size} bytes, at most {bound}")


def _check_name(raw: bytes) -> str:
    # The name appears in logs and error texts, so it must not contain line breaks or control characters.
    try:
        name = raw.decode()
    except UnicodeDecodeError as exc:
        raise HandshakeError("the name of the agent is not UTF-8") from exc
    if not name or not name.isprintable():
        raise HandshakeError("the name of the agent is empty or not printable")
    return name


def _check_key(name: str, public_key: bytes) -> None:
    if not public_key:
        return
    if len(public_key) != KEY_BYTES or not any(public_key):
        raise HandshakeError(f"a public key of {len(public_key)} bytes, expected {KEY_BYTES}, not all of them 0")
    if not name.endswith(expected := key_hash(public_key)):
        raise HandshakeError(f"{name!r} is not the name of an agent with its key, which ends in {expected}")
