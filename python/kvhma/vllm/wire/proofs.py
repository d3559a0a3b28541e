# SPDX-License-Identifier: Apache-2.0
"""Who says it: hellos are signed by the worker they are of, answers about leases proved to be of its engine.

Without them a stranger could repeat a hello as its own, or repeat it whole and answer questions about leases in the
engine's place. Neither needs a secret::

    worker's key   named by its agent, which D reads from
      signs        hello, and the key of the engine's listener
                     shared with a key of D's
      proves       what P says of D's claims
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

_HELLO = b"kvhma-hello-3"
_LEASES = b"kvhma-leases-3"
_PROOF_BYTES = 16


def new_agent_key() -> tuple[bytes, bytes]:
    """Return a new Ed25519 key for a worker's hello: 32 private and 32 public bytes."""
    key = Ed25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def sign_hello(private: bytes, nonce: bytes, engine_key: bytes, data: bytes) -> bytes:
    """Sign a worker's hello for who asked with this nonce.

    Args:
        private: Ed25519 private key of the worker, 32 bytes.
        nonce: of the question.
        engine_key: public :class:`ProofKey` of the worker's engine, 32 bytes.
        data: the hello.

    Returns:
        64 bytes.
    """
    return _private_key(private).sign(_signed(nonce, engine_key, data))


def verify_hello(public: bytes, nonce: bytes, engine_key: bytes, data: bytes, signature: bytes) -> bool:
    """Return whether who has the private key of `public`, 32 bytes, has signed this hello for this nonce."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _signed(nonce, engine_key, data))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(nonce: bytes, engine_key: bytes, data: bytes) -> bytes:
    # Of the hello its hash: to hash the largest one here gives way to other threads, Ed25519's own hash does not.
    return _HELLO + nonce + engine_key + hashlib.blake2b(data).digest()


_private_key = lru_cache(256)(Ed25519PrivateKey.from_private_bytes)
"""A worker's; making it takes as long as signing."""


class ProofKey:
    """A process's X25519 key. Two of them have a key in common that nobody else knows.

    Attributes:
        public: 32 bytes, to be told to others.
    """

    def __init__(self) -> None:
        """Make a new one."""
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        # An engine is asked by some hundred others, again and again; a stranger's keys push out others at most.
        self.shared = lru_cache(1024)(self._shared)

    def _shared(self, other: bytes) -> bytes:
        """Return the key, 32 bytes, that this one has in common with another public one.

        Raises:
            HandshakeError: it is none.
        """
        try:
            exchanged = self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:
            raise HandshakeError("the key of the question or of the engine is none of X25519") from error
        return hashlib.blake2b(exchanged, digest_size=32, person=_LEASES).digest()


@dataclass(frozen=True, slots=True)
class Proving:
    """What a reader needs to have an engine's answers proved.

    Attributes:
        reader_key: our public key, for the question.
        shared: the key in common with the engine.
    """

    reader_key: bytes
    shared: bytes = field(repr=False)


def prove(shared: bytes, nonce: bytes, claims: Sequence[WireClaim], answer: Leases) -> bytes:
    """Return the proof, 16 bytes, that who shares this key gave this answer to this question."""
    contents = () if answer.contents is None else (answer.contents,)
    said = msgspec.msgpack.encode((nonce, claims, answer.states, *contents))
    return hashlib.blake2b(said, digest_size=_PROOF_BYTES, key=shared).digest()


def is_proved(shared: bytes, nonce: bytes, claims: Sequence[WireClaim], answer: Leases) -> bool:
    """Return whether the proof of an answer is :func:`prove`'s."""
    return hmac.compare_digest(answer.proof or b"", prove(shared, nonce, claims, answer))
