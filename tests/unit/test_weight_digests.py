# SPDX-License-Identifier: Apache-2.0
"""Digests of weights: which change of the files they show, and what they read for it."""

import gc
import json
import os
import struct
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvhma.vllm.config import weight_digests
from kvhma.vllm.config.weight_digests import DIGEST_CHARS, LEVELS, PAGE_BYTES, digest_files
from support.waiting import until
from support.weights import write_tensors

GB = 10**9


def digest(*paths, seconds=60.0):
    found = digest_files(paths, time.monotonic() + seconds)
    return [found[at : at + DIGEST_CHARS] for at in range(0, len(found), DIGEST_CHARS)]


def weights(layers=3, size=64, **changed):
    rng = np.random.default_rng(1)
    found = {f"layers.{index}.{name}": rng.normal(size=(size, size)) for index in range(layers) for name in "qkv"}
    return found | {f"layers.{index}.norm": rng.normal(size=size) for index in range(layers)} | changed


def sparse(path, sizes, dtype="U8"):
    """A file of safetensors whose tensors have these sizes, and whose bytes are zero and take no space."""
    header, at = {}, 0
    for name, nbytes in sizes.items():
        header[name] = {"dtype": dtype, "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return path, 8 + len(text)


@pytest.fixture
def reads(monkeypatch):
    """The sizes of all reads."""
    found = []
    pread = os.pread

    def counted(descriptor, nbytes, at):
        found.append(nbytes)
        return pread(descriptor, nbytes, at)

    monkeypatch.setattr(os, "pread", counted)
    return found


def test_equal_weights_in_other_files(tmp_path):
    whole = weights()
    write_tensors(tmp_path / "model.safetensors", whole)
    names = sorted(whole, key=lambda name: name[::-1])
    for index in range(4):
        write_tensors(tmp_path / f"{index}.safetensors", {name: whole[name] for name in names[index::4]})
    parts = [tmp_path / f"{index}.safetensors" for index in (2, 0, 3, 1)]
    assert digest(*parts) == digest(tmp_path / "model.safetensors")
    assert len(digest(*parts)) == len(LEVELS)


@pytest.mark.parametrize("name", weights())
def test_one_changed_byte_of_a_small_model(tmp_path, name):
    """Up to 16 MiB are read whole."""
    changed = np.array(weights()[name])
    changed.flat[-1] += 1
    write_tensors(tmp_path / "a.safetensors", weights())
    write_tensors(tmp_path / "b.safetensors", weights(**{name: changed}))
    one, other = digest(tmp_path / "a.safetensors"), digest(tmp_path / "b.safetensors")
    assert (one[0], one[-1] == other[-1]) == (other[0], False)


@pytest.mark.parametrize("change", ["name", "shape", "type", "missing", "more"])
def test_other_tensors_differ_in_the_first_digest(tmp_path, change):
    one, _ = sparse(tmp_path / "a.safetensors", {"a": 1 << 20, "b": 1 << 20})
    sizes = {
        "name": {"a": 1 << 20, "c": 1 << 20},
        "shape": {"a": 1 << 19, "b": 1 << 20},
        "type": {"a": 1 << 20, "b": 1 << 20},
        "missing": {"a": 1 << 20},
        "more": {"a": 1 << 20, "b": 1 << 20, "c": 0},
    }
    other, _ = sparse(tmp_path / "b.safetensors", sizes[change], "I8" if change == "type" else "U8")
    assert digest(one)[0] != digest(other)[0]


def test_100_gb_take_4096_reads_of_a_page(tmp_path, reads):
    """As 25 files of 40 tensors, which need 8 and a header's bytes each, besides the samples."""
    files, headers = zip(
        *(
            sparse(tmp_path / f"{index}.safetensors", {f"layers.{index}.{at}": GB // 10 for at in range(40)})
            for index in range(25)
        ),
        strict=True,
    )
    assert sum(file.stat().st_size for file in files) > 100 * GB
    assert len(digest(*files)) == len(LEVELS)
    samples = len(reads) - 2 * len(files)
    assert 4000 < samples <= 4096
    assert sum(reads) <= samples * PAGE_BYTES + sum(headers)


def test_a_changed_region_of_100_gb(tmp_path, monkeypatch):
    """A tensor of the 4,000 is always seen, and so is a region of two spans; a region of a page hardly ever.

    Each tensor has at least one page. All but one are small, so the large one has the remaining 96 or so.
    """
    sizes = {f"layers.{index:04}": 100_000 for index in range(4000)} | {"embed": 99 * GB}
    file, start = sparse(tmp_path / "model.safetensors", sizes)
    before, sampled = digest(file), set()
    choose = weight_digests.choose_samples

    def noted(*given):
        samples = choose(*given)
        sampled.update((tensor.name, page) for tensor, page in samples)
        return samples

    monkeypatch.setattr(weight_digests, "choose_samples", noted)
    digest(file)
    assert len({name for name, _ in sampled}) == 4001
    large = sorted(page for name, page in sampled if name == "embed")
    span = -(-99 * GB // PAGE_BYTES) // len(large)
    assert len(large) > 80
    assert max(after - page for page, after in pairwise(large)) < 2 * span

    def change(begin, nbytes):
        with file.open("r+b") as opened:
            opened.seek(begin)
            was = opened.read(nbytes)
            opened.seek(begin)
            opened.write(b"\1" * nbytes)
        after = digest(file)
        with file.open("r+b") as opened:
            opened.seek(begin)
            opened.write(was)
        return [one == other for one, other in zip(before, after, strict=True)]

    assert change(start + 1234 * 100_000, 100_000)[-1] is False
    page = next(page for page in range(1 << 20) if page not in large)
    assert change(start + 4000 * 100_000 + page * PAGE_BYTES, PAGE_BYTES) == [True] * 4, "what no sample covers"


def test_more_tensors_than_samples(tmp_path, reads):
    file, _ = sparse(tmp_path / "a.safetensors", {f"experts.{index}": 100 for index in range(9000)})
    digest(file)
    assert Counter(reads)[100] == 4096


def test_tensors_of_all_sizes_are_read_within_their_bounds(tmp_path, reads):
    sizes = dict(enumerate([0, 1, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 1 << 20]))
    file, header = sparse(tmp_path / "a.safetensors", {str(name): size for name, size in sizes.items()})
    digest(file)
    assert sum(reads) == header + sum(sizes.values())


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


def test_out_of_time_the_last_levels_are_left_out(tmp_path, monkeypatch):
    """The two sides compare the levels that both have. A read that hangs delays nothing."""
    file, start = sparse(tmp_path / "a.safetensors", {str(index): 1 << 20 for index in range(64)})
    whole = digest(file)
    clock, hangs, reads = Clock(), threading.Event(), []
    pread = os.pread

    def hanging(descriptor, nbytes, at):
        if at >= start:
            reads.append(at)
            if len(reads) > 64:
                hangs.wait(20)
                hangs.set()
            elif len(reads) == 64:
                clock.now = 600 - 1e-3
        return pread(descriptor, nbytes, at)

    monkeypatch.setattr(os, "pread", hanging)
    monkeypatch.setattr(weight_digests, "time", clock)
    found = digest_files([file], 600.0)
    hangs.set()
    assert found == "".join(whole[:2])
    with pytest.raises(match=r"headers of 1 files could not be read in time"):
        digest_files([file], clock.now)


def header(text, declared=None):
    return struct.pack("<Q", len(text) if declared is None else declared) + text


def entry(**changes):
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes
    return header(json.dumps({"__metadata__": {"format": "pt"}, "a": tensor}).encode()) + bytes(16)


BAD = {
    "empty": (b"", "0 bytes"),
    "a header longer than the file": (header(b"{}", 1 << 40), "a header of 1099511627776"),
    "a header longer than all others": (header(b"{}", (1 << 63) + 5), "a header of"),
    "no object": (header(b"[]"), "is not that of safetensors"),
    "not JSON": (header(b"\xff{"), "is not that of safetensors"),
    "deep": (header(b'{"a":' + b"[" * 100_000), "is not that of safetensors"),
    "no tensors": (header(b"{}"), "no file has a tensor"),
    "a cut file": (entry()[:-1], "a tensor that ends at byte"),
    "bytes that do not exist": (entry(data_offsets=[0, 1 << 50]), "a tensor that ends at byte"),
    "a huge end": (entry(data_offsets=[0, 1 << 63]), "is not that of safetensors"),
    "before the data": (entry(data_offsets=[-8, 8]), "is not that of safetensors"),
    "backwards": (entry(data_offsets=[16, 0]), "a tensor that ends at byte"),
    "a long type": (entry(dtype="F" * 99), "is not that of safetensors"),
    "many dimensions": (entry(shape=[1] * 99), "is not that of safetensors"),
    "a negative dimension": (entry(shape=[-1]), "is not that of safetensors"),
}


@pytest.mark.parametrize(("data", "text"), BAD.values(), ids=BAD)
def test_a_header_that_is_no_header(tmp_path, reads, data, text):
    file = tmp_path / "a.safetensors"
    file.write_bytes(data)
    with pytest.raises(match=text):
        digest(file)
    assert sum(reads) <= len(data)


def test_a_tensor_twice(tmp_path):
    for name in "ab":
        write_tensors(tmp_path / f"{name}.safetensors", weights())
    with pytest.raises(match=r"'layers.0.k' is in the files twice"):
        digest(tmp_path / "a.safetensors", tmp_path / "b.safetensors")


def test_a_file_that_is_gone(tmp_path):
    with pytest.raises(FileNotFoundError):
        digest(tmp_path / "model.safetensors")


def test_files_are_closed(tmp_path):
    write_tensors(tmp_path / "a.safetensors", weights())
    digest(tmp_path / "a.safetensors")
    opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [name for name in opened if str(tmp_path) in name]


def test_a_file_that_is_refused_is_closed_at_once(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 100)

    def is_open():
        files = Path("/proc/self/fd").iterdir()
        return any(file.exists() and file.samefile(path) for file in files)

    gc.disable()
    try:
        with pytest.raises(ValueError, match="a header of"):
            digest(path)
        until(lambda: not is_open())
    finally:
        gc.enable()
