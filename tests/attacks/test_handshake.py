# SPDX-License-Identifier: Apache-2.0
"""A payload comes from the network: for any bytes, decoding raises only HandshakeError, and stays small."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import tracemalloc

import numpy as np
import pytest

from kvhma.errors import GeometryError, HandshakeError
from kvhma.nixl import MAX_HANDSHAKE_BYTES, decode_handshake, encode_handshake
from kvhma.nixl.handshake import MAX_EXTRA_BYTES, MAX_GEOMETRY_BYTES, MAX_METADATA_BYTES, MAX_NAME_BYTES
from support.flat import flat_geometry

HEAD = struct.Struct("<8sHHIIIQ32s")
MAGIC = b"kvhma-hi"


@pytest.fixture(scope="module")
def geometry():
    return flat_geometry(np.zeros(8192, np.uint8))


@pytest.fixture(scope="module")
def payload(geometry):
    return encode_handshake(b"nixl" * 50, geometry, name="P-0", incarnation=2**64 - 1, extra=b"\x00\xff")


def forge(name=b"P-0", metadata=b"md", geometry=b"{}", extra=b"", *, version=2, sizes=None, public_key=b""):
    """Pack a message with any content and a right digest."""
    body = name + metadata + geometry + extra
    head = HEAD.pack(MAGIC, version, *(sizes or map(len, (name, metadata, geometry, extra))), 7, public_key)
    return head + hashlib.blake2b(head + body, digest_size=16).digest() + body


def test_round_trip(geometry, payload):
    for form in (payload, bytearray(payload), memoryview(payload)):
        said = decode_handshake(form)
        assert (said.name, said.incarnation, said.metadata, said.extra) == (
            "P-0",
            2**64 - 1,
            b"nixl" * 50,
            b"\0\xff",
        )
        assert said.geometry == geometry
    assert decode_handshake(forge(geometry=geometry.to_json())).name == "P-0"


def test_cut_off_at_every_length(payload):
    for length in range(len(payload)):
        with pytest.raises(HandshakeError):
            decode_handshake(payload[:length])
    with pytest.raises(HandshakeError, match="its header says"):
        decode_handshake(payload + b"\0")


def test_every_byte_matters(payload):
    for at in range(len(payload)):
        damaged = bytearray(payload)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(HandshakeError):
            decode_handshake(damaged)


@pytest.mark.parametrize("start", [b"", MAGIC, MAGIC + b"\2\0"])
def test_random_bytes(start):
    for seed in range(2000):
        rng = random.Random(seed)
        with pytest.raises(HandshakeError):
            decode_handshake(start + rng.randbytes(rng.randrange(200)))


def test_random_geometry_with_a_right_digest(geometry):
    raw = geometry.to_json()
    for seed in range(2000):
        rng = random.Random(seed)
        damaged = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            said = decode_handshake(forge(geometry=bytes(damaged)))
        except HandshakeError:
            continue
        assert said.geometry.regions  # a changed digit can be another good geometry


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("regions", 0, "base"), 2**64 - 1),
        (("layers", 0, "num_blocks"), 2**63),
        (("layers", 0, "name"), "x" * 257),
        (("more",), 1),
    ],
    ids=str,
)
def test_a_geometry_that_contradicts_itself(geometry, path, value):
    """test_geometry.py has the others."""
    form = json.loads(geometry.to_json())
    place = form
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(HandshakeError, match="the geometry of 'P-0'") as info:
        decode_handshake(forge(geometry=json.dumps(form).encode()))
    assert isinstance(info.value.__cause__, (GeometryError, OverflowError))


def test_versions():
    for version in (0, 1, 3, 65535):
        with pytest.raises(HandshakeError, match=f"speaks version {version} .* this side version 2"):
            decode_handshake(forge(version=version))
    # Even if the rest of the header is another one.
    with pytest.raises(HandshakeError, match="speaks version 3"):
        decode_handshake(MAGIC + b"\3\0")


KEY = bytes(range(32))
KEY_HASH = hashlib.blake2b(KEY, digest_size=16, person=b"kvhma agent").hexdigest()


def test_the_name_of_an_agent_with_a_key_ends_in_its_hash(geometry):
    name = f"P-0-{KEY_HASH}"
    payload = encode_handshake(b"nixl", geometry, name=name, incarnation=1, public_key=KEY)
    assert (decode_handshake(payload).name, decode_handshake(payload).public_key) == (name, KEY)
    assert decode_handshake(forge(geometry=geometry.to_json())).public_key == b""


@pytest.mark.parametrize("name", ["P-0", KEY_HASH + "-", KEY_HASH[:-1] + "0", KEY_HASH.upper()])
def test_a_name_that_belongs_to_another_key(geometry, name):
    with pytest.raises(HandshakeError, match="is not the name of an agent with its key, which ends in " + KEY_HASH):
        decode_handshake(forge(name.encode(), geometry=geometry.to_json(), public_key=KEY))
    with pytest.raises(HandshakeError, match="is not the name"):
        encode_handshake(b"nixl", geometry, name=name, incarnation=1, public_key=KEY)


@pytest.mark.parametrize("key", [bytes(32), b"k", bytes(33)])
def test_invalid_keys(geometry, key):
    with pytest.raises(HandshakeError, match=f"a public key of {len(key)} bytes"):
        encode_handshake(b"nixl", geometry, name="P-0", incarnation=1, public_key=key)


@pytest.mark.parametrize("name", [b"", b"\xff", b"a\nb", b"a\x00", b"\x1b[31m", "‮".encode(), b"\xed\xa0\x80"], ids=repr)
def test_names_that_do_not_belong_into_a_log(name):
    with pytest.raises(HandshakeError, match="name"):
        decode_handshake(forge(name=name))


@pytest.mark.parametrize(
    "data", [None, 1, "text", [1], object(), memoryview(bytes(8)).cast("I")], ids=lambda data: type(data).__name__
)
def test_values_that_are_not_bytes(data):
    with pytest.raises(HandshakeError):
        decode_handshake(data)


@pytest.mark.parametrize("place", range(4))
def test_sizes_are_checked_before_anything_is_read(place):
    bounds = [MAX_NAME_BYTES, MAX_METADATA_BYTES, MAX_GEOMETRY_BYTES, MAX_EXTRA_BYTES]
    sizes = [3, 2, 2, 0]
    sizes[place] = bounds[place] + 1
    with pytest.raises(HandshakeError, match=f"of {sizes[place]} bytes, at most"):
        decode_handshake(forge(sizes=sizes))
    sizes[place] = [2**16, 2**32, 2**32, 2**32][place] - 1
    with pytest.raises(HandshakeError):
        decode_handshake(forge(sizes=sizes))


def test_too_long_is_refused_without_a_look():
    data = bytes(MAX_HANDSHAKE_BYTES + 1)
    tracemalloc.start()
    try:
        with pytest.raises(HandshakeError, match="at most"):
            decode_handshake(data)
        with pytest.raises(HandshakeError):
            decode_handshake(forge(sizes=[3, MAX_METADATA_BYTES, MAX_GEOMETRY_BYTES, 0]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_encoding_keeps_to_the_bounds(geometry):
    def encode(**changes):
        fields = {
            "agent_metadata": b"",
            "geometry": geometry,
            "name": "P",
            "incarnation": 0,
            "extra": b"",
            **changes,
        }
        return encode_handshake(fields.pop("agent_metadata"), fields.pop("geometry"), **fields)

    assert decode_handshake(encode(extra=bytes(MAX_EXTRA_BYTES))).extra == bytes(MAX_EXTRA_BYTES)
    for changes in (
        {"name": ""},
        {"name": "x" * (MAX_NAME_BYTES + 1)},
        {"name": "a\nb"},
        {"name": "\ud800"},
        {"extra": bytes(MAX_EXTRA_BYTES + 1)},
        {"agent_metadata": bytes(MAX_METADATA_BYTES + 1)},
        {"incarnation": -1},
        {"incarnation": 2**64},
    ):
        with pytest.raises(HandshakeError):
            encode(**changes)
