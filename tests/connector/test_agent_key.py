# SPDX-License-Identifier: Apache-2.0
"""An agent's name cannot be taken: its hello is signed for who asks."""

import secrets

import numpy as np
import pytest

pytest.importorskip("cryptography")

from kvhma.errors import HandshakeError
from kvhma.nixl import decode_handshake, encode_handshake, key_hash
from kvhma.vllm.wire.agent_key import AgentKey, check_signature, digest_of
from support.flat import flat_geometry

NONCE = bytes(range(16))
GEOMETRY = flat_geometry(np.zeros(8192, np.uint8))


def hello_of(key: AgentKey, *, extra: bytes = b"", start: str = "P") -> bytes:
    return encode_handshake(
        b"nixl", GEOMETRY, name=key.agent_name(start), incarnation=1, extra=extra, public_key=key.public
    )


def check(hello: bytes, nonce: bytes, signature: bytes) -> None:
    check_signature(decode_handshake(hello), hello, nonce, signature)


def test_the_scheduler_signs_what_the_worker_said():
    worker = AgentKey.new()
    hello = hello_of(worker)
    in_scheduler = AgentKey(worker.private)
    assert in_scheduler.public == worker.public
    check(hello, NONCE, in_scheduler.sign(NONCE, digest_of(hello)))
    assert worker.agent_name("P") == f"P-{key_hash(worker.public)}"
    assert AgentKey.new().public != worker.public


def test_a_signature_is_of_one_hello_for_one_question():
    key, other = AgentKey.new(), AgentKey.new()
    hello = hello_of(key)
    signature = key.sign(NONCE, digest_of(hello))
    for what, nonce, signed in (
        (hello, secrets.token_bytes(16), signature),
        (hello_of(key, extra=b"changed"), NONCE, signature),
        (hello, NONCE, other.sign(NONCE, digest_of(hello))),
        (hello, NONCE, bytes(64)),
        (hello, NONCE, b""),
        (hello, NONCE, signature + b"\0"),
    ):
        with pytest.raises(HandshakeError, match="was not signed by that agent"):
            check(what, nonce, signed)


def test_a_hello_without_a_key_is_nobodys():
    hello = encode_handshake(b"nixl", GEOMETRY, name="P", incarnation=1)
    with pytest.raises(HandshakeError, match="'P' has no key to sign with"):
        check(hello, NONCE, bytes(64))


@pytest.mark.parametrize("public", [b"\xff" * 32, b"\1" + bytes(31)])
def test_keys_that_are_no_points_or_fit_every_message(public):
    """Of a key of low order some signatures are of every message; it is still nobody else's name."""
    name = f"P-{key_hash(public)}"
    hello = encode_handshake(b"nixl", GEOMETRY, name=name, incarnation=1, public_key=public)
    with pytest.raises(HandshakeError, match="was not signed"):
        check(hello, NONCE, bytes(63) + b"\1")
