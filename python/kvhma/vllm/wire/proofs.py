# SPDX-License-Identifier: Apache-2.0
"""Authenticity: a worker signs its identity, and its engine proves answers about leases.

Otherwise an unknown peer could replay a worker identity as its own, or replay it unchanged and answer questions about
leases for that engine. This works without a shared secret::

    worker's key               | named by the agent that D reads from
    signs                      | worker identity, and the key of the engine's listener
    which with D's own key     |
    proves                     | P's answers about D's claims
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from kvhma.errors import HandshakeError
from kvhma.vllm.wire.messages import Leases, WireClaim

_IDENTITY = b"kvhma-hello-3"
_LEASES = b"kvhma-leases-3"
_PROOF_BYTES = 16


def new_agent_key() -> tuple[bytes, bytes]:
    """Return a new Ed25519 key for a worker identity: 32 private and 32 public bytes."""
    key = Ed25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def sign_identity(private: bytes, nonce: bytes, engine_key: bytes, data: bytes) -> bytes:
    """Sign a worker identity for the peer that asked with this nonce.

    Args:
        private: Ed25519 private key of the worker, 32 bytes.
        nonce: of the question.
        engine_key: public :class:`ProofKey` of the worker's engine, 32 bytes.
        data: the worker identity.

    Returns:
        64 bytes.
    """
    return _private_key(private).sign(_signed(nonce, engine_key, data))


def verify_identity(public: bytes, nonce: bytes, engine_key: bytes, data: bytes, signature: bytes) -> bool:
    """Return whether the private key of `public`, 32 bytes, has signed this worker identity for this nonce."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _signed(nonce, engine_key, data))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(nonce: bytes, engine_key: bytes, data: bytes) -> bytes:
    # The hash of the data: hashlib releases Python's lock while it hashes megabytes, and Ed25519 does not.
    return _IDENTITY + nonce + engine_key + hashlib.blake2b(data).digest()


_private_key = lru_cache(256)(Ed25519PrivateKey.from_private_bytes)
"""Cached, because making the key takes as long as signing."""


class ProofKey:
    """A process's X25519 key. Two processes derive a common key from their keys, which only they know.

    Attributes:
        public: 32 bytes, to be sent to the other process.
    """

    def __init__(self) -> None:
        """Make a new key."""
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        # Some hundred engines ask again and again. Keys of unknown peers only evict cached ones.
        self.shared = lru_cache(1024)(self._shared)

    def _shared(self, peer_public: bytes) -> bytes:
        """Return the key, 32 bytes, that this key and a peer's public key have in common.

        Raises:
            HandshakeError: `peer_public` is not a key of X25519.
        """
        try:
            exchanged = self._private.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError as error:
            raise HandshakeError("the key of the question or of the engine is no X25519 key") from error
        return hashlib.blake2b(exchanged, digest_size=32, person=_LEASES).digest()


@dataclass(frozen=True, slots=True)
class Proving:
    """What a reader needs to check an engine's proofs.

    Attributes:
        reader_key: its public key, for the question.
        shared: the key that it and the engine have in common.
    """

    reader_key: bytes
    shared: bytes = field(repr=False)


def prove(shared: bytes, nonce: bytes, claims: Sequence[WireClaim], answer: Leases) -> bytes:
    """Return the proof, 16 bytes, that the owner of a shared key gave this answer to this question."""
    optional = (value for value in (answer.contents, answer.incarnation_id) if value is not None)
    said = msgspec.msgpack.encode((nonce, claims, answer.states, *optional))
    return hashlib.blake2b(said, digest_size=_PROOF_BYTES, key=shared).digest()


def is_proved(shared: bytes, nonce: bytes, claims: Sequence[WireClaim], answer: Leases) -> bool:
    """Return whether an answer has the proof that :func:`prove` makes."""
    return hmac.compare_digest(answer.proof or b"", prove(shared, nonce, claims, answer))
