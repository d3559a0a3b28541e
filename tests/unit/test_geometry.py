# SPDX-License-Identifier: Apache-2.0
"""A geometry is read once: its content does not depend on whether it came from JSON or from Python values."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle
import sys
import threading
from typing import Any

import pytest

from kvhma import AddressOverflowError, GeometryError, plan
from kvhma._kvhma import CheckedGeometry
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.models import Model, model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.oracle import Oracle
from support.tiny import tiny_hybrid

PAGE = Page((Part("kv", "uint8", 1, 0, (Axis("tokens", 4, 4), Axis("content", 4, 1))),))
OPTIONS: list[Geometry] = [
    tiny_hybrid(10),
    *(
        layout(model(name), LayoutOptions(num_blocks=20, tp_size=2, tp_rank=1))
        for name in ("gemma-3-27b", "granite-4.0-h-tiny")
    ),
    layout(model("Qwen3.5-0.8B"), LayoutOptions(num_blocks=20, kernel_block="flashinfer")),
    # No field has its default.
    Geometry(
        (Region(1 << 40, 1 << 20, "VRAM", 3), Region(4096, 4096)),
        (Group("sliding", 8, 2, window=7, cp_rank=1, cp_size=3), Group("chunked", 4, chunk=4)),
        (
            Layer("ä\n\x7f", 0, 0, 64, 10, 32, PAGE, 16),  # the default stride, explicit
            Layer("b", 0, 0, 1 << 10, 10, 32, dataclasses.replace(PAGE)),
            Layer("c", 1, 0, 1 << 12, 10, 64, Page((Part("w", "raw", 8, 16, (Axis("x", 9, 8, 5, 1, True),)),))),
            Layer("d", 1, 1, 0, 4, 64, Page((Part("w", "raw", 1, 0, (Axis("rows", 3, 1, spare=2),)),))),
        ),
        tp_rank=1,
        tp_size=2,
        null_block=None,
    ),
    Geometry((), (), (), null_block=5),
]


def form(geometry: Geometry) -> dict[str, Any]:
    """The JSON form as docs/geometry.md defines it."""

    def told(value: Any) -> dict[str, Any]:
        return {key: item for key, item in dataclasses.asdict(value).items() if item is not None}

    def axis(value: Axis) -> dict[str, Any]:
        return {key: item for key, item in told(value).items() if item or key not in ("may_repeat", "spare")}

    pages = list(dict.fromkeys(layer.page for layer in geometry.layers))
    return {
        "kvhma": 1,
        "tp_rank": geometry.tp_rank,
        "tp_size": geometry.tp_size,
        "null_block": geometry.null_block,
        "regions": [told(region) for region in geometry.regions],
        "groups": [told(group) for group in geometry.groups],
        "pages": [
            {"parts": [{**told(part), "axes": [axis(one) for one in part.axes]} for part in page.parts]}
            for page in pages
        ],
        "layers": [{**told(layer), "page": pages.index(layer.page)} for layer in geometry.layers],
    }


@pytest.mark.parametrize("geometry", OPTIONS, ids=repr)
def test_json_round_trip(geometry: Geometry) -> None:
    text = geometry.to_json()
    assert geometry.to_form() == json.loads(text)
    assert text == json.dumps(form(geometry), separators=(",", ":"), ensure_ascii=False).encode()
    for written in (text, geometry.to_json(indent=2), text.decode(), bytearray(text)):
        read = Geometry.from_json(written)  # type: ignore[arg-type]
        assert read.to_json() == text
        assert read == geometry
        assert hash(read) == hash(geometry)
        assert repr(read) == repr(geometry)
        for field in dataclasses.fields(Geometry):
            if field.compare:
                mine, theirs = getattr(read, field.name), getattr(geometry, field.name)
                assert (mine, type(mine), repr(mine)) == (theirs, type(theirs), repr(theirs))


def test_indented_json_is_pythons() -> None:
    for geometry in OPTIONS:
        assert geometry.to_json(indent=2) == json.dumps(form(geometry), indent=2, ensure_ascii=False).encode()


def test_other_threads_run_while_json_is_read() -> None:
    layer = {"group": 0, "page": 0, "region": 0, "offset": 0, "num_blocks": 1, "block_stride": 16}
    text = form(OPTIONS[4]) | {"layers": [{**layer, "name": f"layer {index}"} for index in range(16_000)]}
    raw, ran, start = json.dumps(text).encode(), [], threading.Lock()

    def other() -> None:
        with start:
            ran.append(True)

    interval = sys.getswitchinterval()
    start.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    try:
        sys.setswitchinterval(60)  # the other thread runs only when this one yields
        start.release()
        CheckedGeometry(raw)
        assert ran
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_a_geometry_cannot_be_changed() -> None:
    for geometry in (tiny_hybrid(10), Geometry.from_json(tiny_hybrid(10).to_json())):
        for name in ("layers", "tp_rank", "core"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(geometry, name, ())
        with pytest.raises(AttributeError, match="'Geometry' object has no attribute 'layer'"):
            geometry.layer  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.parametrize("geometry", OPTIONS, ids=repr)
def test_copies_and_pickles(geometry: Geometry) -> None:
    assert copy.copy(geometry) is geometry
    assert copy.deepcopy(geometry) is geometry
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(geometry, protocol))
        assert (back, back.to_json()) == (geometry, geometry.to_json())
    for value in (*geometry.regions, *geometry.groups, *geometry.layers):
        assert copy.deepcopy(value) == value == pickle.loads(pickle.dumps(value))


def spoiled(path: str, value: object) -> Geometry:
    """A small geometry of Python values, with the one at `path` changed."""
    geometry = tiny_hybrid(10)
    kind, _, field = path.partition(".")
    if not field:
        return dataclasses.replace(geometry, **{kind: value})  # type: ignore[arg-type]
    layer = geometry.layers[0]
    if kind in ("regions", "groups"):
        first, *others = getattr(geometry, kind)
        return dataclasses.replace(geometry, **{kind: (dataclasses.replace(first, **{field: value}), *others)})  # type: ignore[arg-type]
    if kind == "layers":
        layer = dataclasses.replace(layer, **{field: value})  # type: ignore[arg-type]
    else:
        part = layer.page.parts[0]
        if kind == "axes":
            axis = Axis("content", 64, 2)
            object.__setattr__(axis, field, value)
            part = dataclasses.replace(part, axes=(*part.axes[:-1], axis))
        else:
            part = dataclasses.replace(part, **{field: value})  # type: ignore[arg-type]
        layer = dataclasses.replace(layer, page=Page((part,)))
    return dataclasses.replace(geometry, layers=(layer, *geometry.layers[1:]))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("regions.base", -1, "region 0: base is -1, has to be an integer in 0..2**64"),
        ("regions.base", 2**64, "region 0: base is 18446744073709551616, has to be an integer in 0..2**64"),
        ("regions.base", 1.5, "region 0: base is 1.5, has to be an integer in 0..2**64"),
        ("regions.base", True, "region 0: base is True, has to be an integer"),
        ("regions.base", None, "region 0: base is None, has to be an integer"),
        ("regions.device", 2**32, "region 0: device is 4294967296, has to be an integer in 0..2**32"),
        ("regions.memory", "DISK", 'region 0: memory is \'DISK\', expected "DRAM" or "VRAM"'),
        ("regions.memory", 1, "region 0: memory is 1, has to be a string"),
        ("groups.kind", "paged", "group 0: kind is 'paged', expected one of [\"full\", "),
        ("groups.window", "64", "group 0: window is '64', has to be an integer"),
        ("layers.name", b"a", "layer 0: name is b'a', has to be a string"),
        ("layers.name", "\ud800", "layer 0: name is '\\ud800', has to be a string"),
        ("layers.page", None, "page of layer 0: parts is missing, NoneType is not a Page"),
        ("layers.kernel_stride", 0, 'layer "layers.0": kernel_stride is 0'),
        ("parts.axes", 7, "page of layer 0 part 0: axes is 7, has to be a tuple or a list"),
        ("parts.dtype", None, "page of layer 0 part 0: dtype is None, has to be a string"),
        ("axes.may_repeat", 1, "page of layer 0 part 0 axis 2: may_repeat is 1, has to be True or False"),
        ("axes.length", "2", "page of layer 0 part 0 axis 2: length is '2', has to be an integer"),
        ("regions", 5, "geometry: regions is 5, has to be a tuple or a list"),
        ("regions", (5,), "region 0: base is missing, int is not a Region"),
        ("groups", (Region(0, 1),), "group 0: kind is missing, Region is not a Group"),
        ("layers", (None,), "layer 0: name is missing, NoneType is not a Layer"),
        ("tp_rank", "0", "geometry: tp_rank is '0', has to be an integer in 0..2**32"),
        ("tp_size", 0, "geometry: tp_size is 0, has to be at least 1"),
        ("null_block", -1, "geometry: null_block is -1, has to be an integer in 0..2**64"),
    ],
)
def test_a_wrong_python_value_is_named(path: str, value: object, text: str) -> None:
    with pytest.raises(GeometryError) as info:
        spoiled(path, value)
    assert text in str(info.value)
    assert (info.value.code, info.value.field) == ("geometry", text.split(": ")[1].split(" ")[0])


def test_python_values_are_checked_as_json_is() -> None:
    with pytest.raises(AddressOverflowError, match="region 0: base 0xffffffffffffffff"):
        spoiled("regions.base", 2**64 - 1)
    with pytest.raises(GeometryError, match="a list of 5000, at most 4096 are allowed"):
        spoiled("regions", (Region(0, 1),) * 5000)


@pytest.mark.parametrize("name", ["gemma-3-27b", "granite-4.0-h-tiny", "Qwen3.5-0.8B"])
@pytest.mark.parametrize("kv", ["packed", "split"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_parts_as_layers_move_the_same_copies(name, kv, order):
    """Also where one side packs K and V, and the other side keeps them apart."""

    def rank(size: int, base: int, kv: str) -> Geometry:
        return layout(model(name), LayoutOptions(num_blocks=2000, kv=kv, order=order, tp_size=size, base=base))

    def spans(geometry: Geometry, first: int) -> list[Span]:
        ids = iter(range(first, 2000))  # groups share the blocks
        needed = [1 if group.kind == "ssm" else -(-900 // group.block_size) for group in geometry.groups]
        return [Span(0, [next(ids) for _ in range(count)]) for count in needed]

    local, remote = rank(4, 1 << 40, kv), rank(2, 1 << 50, kv)
    asked = 900, spans(local, 2), spans(remote, 3)
    whole = plan(local, [remote]).transfer(*asked)
    parted = plan(local.by_parts(), [remote.by_parts()]).transfer(*asked)
    assert (parted.reads[0].local == whole.reads[0].local).all()
    assert (parted.reads[0].remote == whole.reads[0].remote).all()


def test_packed_and_split_meet_as_parts():
    small = Model(name="small", layers=("sliding", "full") * 2, kv_heads=4, head_dim=8, dtype="bfloat16", window=20)
    for order, kv in itertools.product(("LBHNC", "LBNHC"), ("packed", "split")):
        local, remote = (
            layout(small, LayoutOptions(num_blocks=20, kv=form, order=order, tp_size=size, base=base)).by_parts()
            for form, size, base in ((kv, 4, 1 << 40), ("split", 2, 1 << 50))
        )
        asked = 50, [Span(0, [1, 2, 3, 4]), Span(0, [5, 6, 7, 8])], [Span(0, [9, 8, 7, 6]), Span(0, [5, 4, 3, 2])]
        Oracle(local, [remote]).check(*asked, plan(local, [remote]).transfer(*asked))


def test_where_the_halves_of_a_packed_part_are():
    """As vLLM's kernels write them: K of a token and head, and V of it behind that."""
    small = Model(name="small", layers=("full",), kv_heads=2, head_dim=8, dtype="bfloat16")
    packed = layout(small, LayoutOptions(num_blocks=3, kv="packed"))
    parts = [layer.page.parts[0] for layer in packed.by_parts().layers]
    (kv,) = packed.layers[0].page.parts
    assert [(part.name, part.offset - kv.offset, part.axes[2].extent) for part in parts] == [("k", 0, 8), ("v", 16, 8)]
    assert {part.axes[:2] for part in parts} == {kv.axes[:2]}


def test_only_a_whole_content_has_halves():
    """A rank with half of the content has no V, and spare items are those of the content's end."""
    axes = Axis("heads", 2, 128), Axis("tokens", 4, 256)
    for content, names in (
        (Axis("content", 32, 4), ["k", "v"]),
        (Axis("content", 32, 4, 0, 16), ["kv"]),
        (Axis("content", 32, 4, spare=2), ["kv"]),
        (Axis("content", 31, 4), ["kv"]),
        (Axis("packed", 32, 4), ["kv"]),
    ):
        assert [one.name for one in Part("kv", "float32", 4, 0, (*axes, content)).halves()] == names
    k, v = Part("kv", "uint8", 1, 7, (*axes, Axis("content", 32, 4))).halves()
    assert (k.offset, v.offset) == (7, 7 + 16 * 4)


def test_names_of_parts():
    described = layout(model("granite-4.0-h-tiny"), LayoutOptions(num_blocks=9)).by_parts(
        lambda name: name.split(".")[2]
    )
    names = {layer.name for layer in described.layers}
    assert {"0.x", "0.B", "0.C", "0.ssm", "5.k", "5.v"} <= names
    latents = layout(model("DeepSeek-V3"), LayoutOptions(num_blocks=9)).by_parts()
    assert {layer.name.rpartition(".")[2] for layer in latents.layers} == {"kv"}
    with pytest.raises(GeometryError, match="name"):
        described.by_parts(lambda name: "same")
