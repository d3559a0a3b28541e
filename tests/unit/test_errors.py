# SPDX-License-Identifier: Apache-2.0
"""Errors are data: the facts in the text of Rust's errors are in attributes, which survive copies and processes."""

from __future__ import annotations

import copy
import json
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvhma
from kvhma import errors, lowlevel
from kvhma._kvhma import digest_tokens
from kvhma.errors import (
    AddressOverflowError,
    BlockIdError,
    GeometryError,
    KvhmaError,
    RequestError,
    UnsupportedPairError,
)
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.models import model
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.tiny import tiny_hybrid

CLASSES = sorted(
    (found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, KvhmaError)),
    key=lambda found: found.__name__,
)
WORDS = {"code", "place", "field", "reason"}


def changed(path: tuple[str | int, ...], value: object) -> bytes:
    """The JSON form of a small geometry with one field set."""
    form = json.loads(tiny_hybrid(8).to_json())
    *before, last = path
    at = form
    for step in before:
        at = at[step]
    at[last] = value
    return json.dumps(form).encode()


def transfer(local: list[Span], tokens: int = 40, remote: list[Span] | None = None) -> kvhma.Transfer:
    return kvhma.plan(tiny_hybrid(8), tiny_hybrid(8, base=1 << 40)).transfer(tokens, local, remote or local)


def spans(*first: int) -> list[Span]:
    return [Span(0, list(first)), Span(0, [4, 5, 6]), Span(0, [7])]


def paired(path: tuple[str | int, ...], value: object) -> kvhma.Plan:
    return kvhma.plan(tiny_hybrid(8), Geometry.from_json(changed(path, value)))


def a_rank_too_few() -> kvhma.Plan:
    one = model("granite-4.0-h-tiny")
    return kvhma.plan(
        layout(one, LayoutOptions(num_blocks=40)), [layout(one, LayoutOptions(num_blocks=40, tp_rank=0, tp_size=2))]
    )


def side(block: int = 16, size: int = 1, rank: int = 0, strides: tuple[int, int, int] = (4, 2, 1)) -> Geometry:
    """One attention layer of two heads and two items, on one of `size` context-parallel ranks."""
    extents = (("tokens", block), ("heads", 2), ("content", 2))
    axes = tuple(Axis(name, extent, step) for (name, extent), step in zip(extents, strides, strict=True))
    page = Page((Part("kv", "uint8", 1, 0, axes),))
    group = Group("full", block, cp_size=size, cp_rank=rank)
    return Geometry((Region(1 << 30, 8 * block * 4),), (group,), (Layer("a", 0, 0, 0, 8, block * 4, page),))


def pieces_without_end() -> kvhma.Plan:
    block = 1 << 21
    return kvhma.plan(side(block), side(block, strides=(2, 2 * block, 1)))


def items_apart() -> kvhma.Plan:
    block = 1 << 20
    return kvhma.plan(side(block), side(block, strides=(1, 2 * block, block)))


def many_blocks(strides: tuple[int, int, int], blocks: int) -> Geometry:
    """One layer of 4 tokens, 4 heads and 64 items a block, with the strides of these."""
    extents = (("tokens", 4), ("heads", 4), ("content", 64))
    axes = tuple(Axis(name, extent, step) for (name, extent), step in zip(extents, strides, strict=True))
    page = Page((Part("kv", "uint8", 1, 0, axes),))
    layer = Layer("a", 0, 0, 0, blocks + 1, 1024, page)
    return Geometry((Region(1 << 30, 1024 * (blocks + 1)),), (Group("full", 4),), (layer,))


def items_apart_in_many_blocks() -> object:
    spans = [Span(0, range(1, 4097))]
    return kvhma.plan(many_blocks((64, 256, 1), 4096), many_blocks((1, 4, 16), 4096)).transfer(4 * 4096, spans, spans)


def one_descriptor_too_many() -> object:
    plan = kvhma.plan(many_blocks((64, 256, 1), 2), many_blocks((256, 64, 1), 2), max_descriptors=31)
    return plan.transfer(8, [Span(0, [1, 2])], [Span(0, [2, 1])])


def no_room_for_descriptors() -> object:
    """A process that may allocate 48 MiB more, while 4 million descriptors need 128 temporarily."""
    blocks = 1 << 18
    plan = kvhma.plan(many_blocks((64, 256, 1), blocks), many_blocks((256, 64, 1), blocks))
    request = 4 * blocks, [Span(0, range(1, blocks + 1))], [Span(0, range(blocks, 0, -1))]
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), before[1]))
    try:
        return plan.transfer(*request)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def lost_what_is_not_read() -> object:
    plan = kvhma.plan(many_blocks((64, 256, 1), 2), many_blocks((64, 256, 1), 2))
    failed = np.array([[(1 << 30) + 1024, 1024, 0], [(1 << 30) + 2048, 8, 0]], dtype=np.uint64)
    return plan.losses(4, [Span(0, [1])], [Span(0, [2])], failed)


def cut_in_thousands_of_ways() -> object:
    return kvhma.plan(side(4096), side(4095)).views(0)


# The call, the class, and the attributes of the error. Every variant of Rust's Error is here.
REFUSED: list[tuple[Callable[[], object], type[KvhmaError], dict[str, Any]]] = [
    (
        lambda: Geometry.from_json("{"),
        GeometryError,
        {"code": "json", "place": "geometry", "expected": "JSON of schema 1"},
    ),
    (
        lambda: Geometry.from_json(b" " * (2**24 + 1)),
        GeometryError,
        {"code": "too-large", "place": "geometry", "value": 2**24 + 1},
    ),
    (
        lambda: Geometry.from_json(changed(("layers", 0, "num_blocks"), 0)),
        GeometryError,
        {
            "code": "geometry",
            "place": 'layer "layers.0"',
            "field": "num_blocks",
            "value": "0",
            "expected": "has to be at least 1",
        },
    ),
    (
        lambda: Geometry.from_json(changed(("regions", 1, "base"), 2**64 - 1)),
        AddressOverflowError,
        {
            "code": "overflow",
            "place": "region 1",
            "value": "base 0xffffffffffffffff + bytes 0x8000",
            "expected": "64 bits",
        },
    ),
    (
        lambda: paired(("pages", 0, "parts", 0, "dtype"), "float8_e4m3fn"),
        UnsupportedPairError,
        {
            "code": "dtype",
            "place": 'layer "layers.0" part "kv"',
            "layer": "layers.0",
            "part": "kv",
            "axis": None,
            "field": "dtype",
            "local": "bfloat16",
            "remote": "float8_e4m3fn",
            "reason": "bytes are moved, never converted",
        },
    ),
    (
        a_rank_too_few,
        UnsupportedPairError,
        {
            "code": "no-source",
            "place": 'layer "model.layers.0.mixer" part "x"',
            "layer": "model.layers.0.mixer",
            "part": "x",
            "field": "shards",
            "local": "channels 1536..3072, rows 0..3",
            "remote": "1 sources",
            "reason": "no source holds these items",
        },
    ),
    (
        lambda: kvhma.plan(side(4099 * 16, 64), side(4093 * 16, 63)),
        UnsupportedPairError,
        {
            "code": "cp-cycle",
            "place": "geometry",
            "layer": None,
            "field": "cp_interleave x cp_size",
            "local": "65584 x 64",
            "reason": "the positions of the context-parallel ranks repeat too late",
        },
    ),
    (
        lambda: kvhma.plan(side(), [side(16, 2), side()]),
        UnsupportedPairError,
        {"code": "cp-overlap", "layer": "a", "part": "kv", "local": "0 of 1", "remote": "source 1"},
    ),
    (pieces_without_end, UnsupportedPairError, {"code": "pieces", "layer": "a", "field": "strides"}),
    (items_apart, UnsupportedPairError, {"code": "split-items", "layer": "a", "field": "stride"}),
    (
        items_apart_in_many_blocks,
        RequestError,
        {"code": "too-many", "field": "descriptors", "value": 4096 * 1024, "expected": f"at most {1 << 20}"},
    ),
    (
        one_descriptor_too_many,
        RequestError,
        {"code": "too-many", "field": "descriptors", "value": 32, "expected": "at most 31"},
    ),
    (
        no_room_for_descriptors,
        RequestError,
        {"code": "no-memory", "field": "descriptors", "value": 1 << 22, "expected": "fewer"},
    ),
    (
        lost_what_is_not_read,
        RequestError,
        {
            "code": "not-read",
            "field": "failed[1]",
            "value": "8 bytes at 0x40000800 of device 0",
            "expected": "bytes that this request reads",
        },
    ),
    (
        cut_in_thousands_of_ways,
        UnsupportedPairError,
        {
            "code": "no-views",
            "place": "",
            "field": "views",
            "reason": "the kernel blocks of the two sides cut each other too often",
        },
    ),
    (
        lambda: transfer(spans(1, 2, 3)[:2]),
        RequestError,
        {"code": "count", "field": "local spans", "value": 2, "expected": 3},
    ),
    (
        lambda: transfer(spans(1, 2, 3), tokens=0),
        RequestError,
        {"code": "value", "place": "", "field": "num_tokens", "value": 0, "expected": "has to be 1 to 1099511627776"},
    ),
    (
        lambda: transfer([Span(2**62, [1]), *spans()[1:]]),
        RequestError,
        {"code": "value", "place": "local group 0", "field": "first", "value": 2**62},
    ),
    (
        lambda: lowlevel.fa_views([0, 0], [16, 16], [16, 0], [1, 1]),
        RequestError,
        {"code": "value", "place": "view 1", "field": "stride", "value": 0},
    ),
    (
        lambda: transfer(spans(1, -2, 3)),
        BlockIdError,
        {"code": "block-range", "place": "local group 0", "field": "ids[1]", "value": -2, "expected": "0..8"},
    ),
    (
        lambda: transfer(spans(1, 2, 0)),
        BlockIdError,
        {"code": "null-block", "place": "local group 0", "field": "ids[2]", "value": 0},
    ),
    (
        lambda: transfer(spans(1, 2, 1)),
        BlockIdError,
        {"code": "duplicate-block", "place": "local group 0", "field": "ids", "value": 1},
    ),
    (
        lambda: transfer(spans(1, 2)),
        RequestError,
        {"code": "missing-tokens", "place": "local group 0", "field": "ids", "value": 32, "expected": "tokens 0..40"},
    ),
    (
        lambda: transfer([Span(0, [1, 2, 3]), Span(0, [4, 5, 6]), Span(0, [3])]),
        RequestError,
        {"code": "overlap", "place": "local", "field": "bytes"},
    ),
    (
        lambda: lowlevel.expand_blocks([1, "x"], 2),  # type: ignore[list-item]
        RequestError,
        {"code": "type", "field": "block_ids", "value": "'x' of type str", "reason": "is not an integer of 64 bits"},
    ),
    (
        lambda: lowlevel.expand_views(np.zeros((2, 3), np.uint64)),
        RequestError,
        {"code": "type", "field": "views", "reason": "expected a uint64 array of shape (n, 5)"},
    ),
    (
        lambda: digest_tokens(b"", [1], 2),
        RequestError,
        {"code": "count", "field": "tokens", "value": 1, "expected": 2, "reason": "1 of 2 are in the list"},
    ),
    (
        lambda: digest_tokens(b"", [1, 2**31], 2),
        RequestError,
        {"code": "value", "field": "tokens", "value": 2**31, "expected": "32 bits"},
    ),
]


CODES = [data["code"] for _, _, data in REFUSED]


def raised(act: Callable[[], object]) -> KvhmaError:
    with pytest.raises(KvhmaError) as caught:
        act()
    return caught.value


@pytest.mark.parametrize(("act", "kind", "data"), REFUSED, ids=CODES)
def test_an_error_of_rust_carries_the_facts_of_its_text(
    act: Callable[[], object], kind: type, data: dict[str, Any]
) -> None:
    error = raised(act)
    assert type(error) is kind
    assert {name: getattr(error, name) for name in data} == data
    values = {"local", "remote", "layer", "part", "axis"} if kind is UnsupportedPairError else {"value", "expected"}
    assert set(vars(error)) == WORDS | values
    assert error.reason
    said = ("place", "local", "remote", "reason") if kind is UnsupportedPairError else ("value",)
    assert all(str(getattr(error, name)) in str(error) for name in said)


@pytest.mark.parametrize("act", [row[0] for row in REFUSED], ids=CODES)
def test_copies_have_all_of_it(act: Callable[[], object]) -> None:
    error = raised(act)
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error), copy.copy(error)):
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_of_python_has_its_class_and_its_text(kind: type[KvhmaError]) -> None:
    error = kind("layer 3: too long")
    assert (str(error), error.reason, error.place, error.field) == ("layer 3: too long", "layer 3: too long", "", "")
    assert error.code == kind.code
    more = kind("layer 3: too long", code="length", place="layer 3", field="name", reason="too long")
    for each in (error, more):
        again = pickle.loads(pickle.dumps(each))
        assert (type(again), str(again), vars(again)) == (kind, str(each), vars(each))
    assert (more.code, more.place, more.field, more.reason) == ("length", "layer 3", "name", "too long")


def test_a_finding_equals_its_error() -> None:
    """The sentence does not depend on which side is local; the values do."""
    one = tiny_hybrid(8)
    other = Geometry.from_json(changed(("pages", 0, "parts", 0, "axes", 2, "extent"), 65))
    for local, remote in ((one, other), (other, one)):
        finding = kvhma.validate(local, remote)[0]
        error = raised(lambda sides=(local, remote): kvhma.plan(*sides))  # type: ignore[misc]
        names = ("code", "place", "layer", "part", "axis", "field", "local", "remote", "reason")
        assert [getattr(error, name) for name in names] == [getattr(finding, name) for name in names]
        assert str(error) == finding.text
        assert (finding.axis, finding.local, finding.remote) == (
            "content",
            *("64" if each is one else "65" for each in (local, remote)),
        )
    assert kvhma.validate(one, other)[0].text == kvhma.validate(other, one)[0].text


def test_untrusted_text_is_printable_and_data_is_unchanged() -> None:
    error = raised(lambda: paired(("pages", 0, "parts", 0, "dtype"), "\x1b[2J"))
    assert isinstance(error, UnsupportedPairError)
    assert error.remote == "\x1b[2J"
    assert str(error).isprintable()
    changed_dtype = Geometry.from_json(changed(("pages", 0, "parts", 0, "dtype"), "\x1b[2J"))
    (finding, *_) = kvhma.validate(tiny_hybrid(8), changed_dtype)
    assert (finding.remote, finding.text) == ("\x1b[2J", str(error))
