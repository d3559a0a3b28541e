# SPDX-License-Identifier: Apache-2.0
"""The key of a worker's NIXL agent: made when it starts, never written down, never sent to another engine.

The agent's name ends in a hash of the public key, which its hello carries (:mod:`kvhma.nixl.handshake`). Who asks for
the hello sends a nonce, and the listener signs both. So nobody else can say something in the name of an agent, and who
repeats the hello word for word only points to the same agent.
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvhma.errors import HandshakeError
from kvhma.nixl import HandshakePayload, key_hash

_PURPOSE = b"kvhma hello\0"


class AgentKey:
    """An Ed25519 key.

    Attributes:
        private: its 32 secret bytes, for the listener in the scheduler's process of the same engine.
        public: its 32 public bytes.
    """

    def __init__(self, private: bytes) -> None:
        """Take the 32 bytes of a private key."""
        self._key = Ed25519PrivateKey.from_private_bytes(private)
        self.private = private
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def new(cls) -> AgentKey:
        """Make one."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    def agent_name(self, start: str) -> str:
        """Return the name of the agent that has this key."""
        return f"{start}-{key_hash(self.public)}"

    def sign(self, nonce: bytes, hello_digest: bytes) -> bytes:
        """Return the signature of a hello for who sent this nonce; 64 bytes.

        Args:
            nonce: what who asks for the hello has drawn, never twice.
            hello_digest: of the hello, see :func:`digest_of`.
        """
        return self._key.sign(_PURPOSE + nonce + hello_digest)


def digest_of(hello: bytes) -> bytes:
    """Return what is signed of a hello, so that each signature costs the same however long the hello is."""
    return hashlib.blake2b(hello).digest()


def check_signature(payload: HandshakePayload, hello: bytes, nonce: bytes, signature: bytes) -> None:
    """Check that the agent of a hello signed it for this nonce; `payload` is what was decoded from it.

    Raises:
        HandshakeError: it has no key, or it did not.
    """
    if not payload.public_key:
        raise HandshakeError(f"the hello of {payload.name!r} has no key to sign with")
    try:
        Ed25519PublicKey.from_public_bytes(payload.public_key).verify(signature, _PURPOSE + nonce + digest_of(hello))
    except (InvalidSignature, ValueError) as error:
        raise HandshakeError(f"the hello of {payload.name!r} was not signed by that agent") from error
