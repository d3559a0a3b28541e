# SPDX-License-Identifier: Apache-2.0
"""Geometries from a malicious peer, or from a writer with a mistake."""

import contextlib
import json
import random

import pytest

import kvhma
from kvhma import AddressOverflowError, Geometry, GeometryError, KvhmaError
from support.tiny import tiny_hybrid

FORM = json.loads(tiny_hybrid(10).to_json())


def changed(path, value):
    form = json.loads(json.dumps(FORM))
    target = form
    for key in path[:-1]:
        target = target[key]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return json.dumps(form)


AXIS = ["pages", 0, "parts", 0, "axes", 0]


@pytest.mark.parametrize(
    ("path", "value", "error", "text"),
    [
        (["kvhma"], 2, GeometryError, "its kvhma field is 2"),
        (["kvhma"], ..., GeometryError, "missing field `kvhma`"),
        (["surprise"], 1, GeometryError, "unknown field `surprise`"),
        (["regions"], {}, GeometryError, "expected a sequence"),
        (["regions", 0, "base"], -1, GeometryError, "invalid value"),
        (["regions", 0, "base"], 1.5, GeometryError, "invalid type"),
        (["regions", 0, "base"], 2**64, GeometryError, "invalid"),
        (["regions", 0, "base"], 2**64 - 10, AddressOverflowError, "region 0: base"),
        (["regions", 0, "bytes"], 0, GeometryError, "region 0: bytes is 0"),
        (["regions", 0, "bytes"], 4096 * 9, GeometryError, "last page ends at byte 40960"),
        (["regions", 0, "memory"], "DISK", GeometryError, 'unknown memory "DISK"'),
        (["groups", 0, "kind"], "paged", GeometryError, 'unknown kind "paged"'),
        (["groups", 0, "kind"], {"full": None}, GeometryError, "expected a string"),
        (["regions", 0, "memory"], {"DRAM": None}, GeometryError, "expected a string"),
        (["regions", 0], [1048576, 40960], GeometryError, "expected an object"),
        (["groups", 0, "block_size"], 0, GeometryError, "group 0: block_size is 0"),
        (["groups", 0, "block_size"], 2**63, GeometryError, "group 0: block_size"),
        (["groups", 0, "block_size"], 32, GeometryError, "block_size 32 / ratio 1 = 32"),
        (["groups", 0, "ratio"], 0, GeometryError, "group 0: ratio is 0"),
        (["groups", 0, "ratio"], 3, GeometryError, "has to divide block_size 16"),
        (["groups", 1, "window"], ..., GeometryError, "window is missing"),
        (["groups", 1, "window"], 0, GeometryError, "window is 0"),
        (["groups", 0, "window"], 5, GeometryError, "only sliding groups have it"),
        (["groups", 0, "speculative"], 1, GeometryError, "has to be 0 in a full group"),
        (["groups", 2, "ratio"], 2, GeometryError, "state is never split"),
        (["groups", 0, "cp_rank"], 1, GeometryError, "has to be below cp_size 1"),
        (["groups", 2, "cp_size"], 2, GeometryError, "it has no positions"),
        (["groups", 0, "cp_size"], 2**40, GeometryError, "cp_size"),
        (["pages", 0, "parts"], [], GeometryError, "a page has at least one part"),
        ([*AXIS, "stride"], 0, GeometryError, "stride is 0"),
        ([*AXIS, "stride"], 100, GeometryError, "has to be at least 128"),
        ([*AXIS, "stride"], 2**63, GeometryError, "last page ends"),
        ([*AXIS, "stride"], 2**64 - 1, AddressOverflowError, "does not fit 64 bits"),
        ([*AXIS, "length"], 3, GeometryError, "has to end within extent 2"),
        ([*AXIS, "start"], 2**64 - 1, GeometryError, "has to end within extent 2"),
        ([*AXIS, "extent"], 0, GeometryError, "extent is 0"),
        ([*AXIS, "name"], "tokens", GeometryError, "another axis"),
        ([*AXIS, "name"], "", GeometryError, "1 to 256 bytes"),
        ([*AXIS, "name"], "x" * 300, GeometryError, "1 to 256 bytes"),
        (["pages", 0, "parts", 0, "item_bytes"], 0, GeometryError, "item_bytes is 0"),
        (["pages", 0, "parts", 0, "offset"], 2**64 - 1, AddressOverflowError, "does not fit"),
        (["pages", 1, "parts", 1, "offset"], 8, GeometryError, "parts may not overlap"),
        (["pages", 1, "parts", 1, "name"], "x", GeometryError, "another part"),
        (["layers", 0, "group"], 3, GeometryError, "group is 3, there are 3"),
        (["layers", 0, "page"], 9, GeometryError, "page is 9"),
        (["layers", 0, "region"], 2, GeometryError, "region is 2"),
        (["layers", 0, "name"], "layers.1", GeometryError, "another layer"),
        (["layers", 0, "num_blocks"], 0, GeometryError, "num_blocks is 0"),
        (["layers", 0, "num_blocks"], 2**32, AddressOverflowError, "does not fit 31 bits"),
        (["layers", 0, "num_blocks"], 11, GeometryError, "last page ends"),
        (["layers", 0, "block_stride"], 0, GeometryError, "block_stride is 0"),
        (["layers", 0, "block_stride"], 2**62, AddressOverflowError, "does not fit 64 bits"),
        (["layers", 0, "kernel_stride"], 0, GeometryError, "kernel_stride is 0"),
        (["layers", 0, "offset"], 2**64 - 1, AddressOverflowError, "does not fit 64 bits"),
        (["layers", 0, "offset"], 1, GeometryError, "last page ends at byte 40961"),
        (["tp_size"], 0, GeometryError, "tp_size is 0"),
        (["tp_rank"], 1, GeometryError, "has to be below tp_size 1"),
    ],
)
def test_one_wrong_field(path, value, error, text):
    with pytest.raises(error) as info:
        Geometry.from_json(changed(path, value))
    assert text in str(info.value)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 10_000, b"[" * 100_000, b'{"kvhma":1']
)
def test_not_a_geometry(data):
    with pytest.raises(GeometryError):
        Geometry.from_json(data)


def test_too_long():
    with pytest.raises(GeometryError, match="at most 16777216 are read"):
        Geometry.from_json(b" " * (1 << 25))


def test_too_many_layers():
    form = {**FORM, "layers": [{**FORM["layers"][0], "name": str(i)} for i in range(20_000)]}
    with pytest.raises(GeometryError, match="a list of 20000, at most 16384"):
        Geometry.from_json(json.dumps(form))


def test_random_damage_never_raises_anything_else():
    raw = bytearray(json.dumps(FORM).encode())
    rng = random.Random(7)
    for _ in range(5000):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with contextlib.suppress(KvhmaError):
            Geometry.from_json(bytes(damaged))


def test_random_numbers_never_raise_anything_else():
    rng = random.Random(11)
    values = [0, 1, 2, 3, 15, 16, 17, 255, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]

    def spoil(node):
        if isinstance(node, dict):
            return {key: spoil(value) for key, value in node.items()}
        if isinstance(node, list):
            return [spoil(value) for value in node]
        return rng.choice(values) if isinstance(node, int) and rng.random() < 0.06 else node

    made = 0
    for _ in range(5000):
        form = spoil(FORM)
        form["kvhma"] = 1
        try:
            geometry = Geometry.from_json(json.dumps(form))
            made += 1
            kvhma.validate(geometry, tiny_hybrid(10))
            kvhma.plan(tiny_hybrid(10), geometry)
        except KvhmaError:
            pass
    assert made > 50
