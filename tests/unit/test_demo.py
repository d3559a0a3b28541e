# SPDX-License-Identifier: Apache-2.0
"""``kvhma demo`` and ``kvhma plan --request``: what they print and how they end, some in a separate process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvhma
from support.cli_run import cli, refused
from support.tiny import tiny_hybrid

SECONDS = 120.0
"""Far more than a run needs: two processes that import NIXL are ready within seconds."""

TOKENS = 40
SPANS = {
    "local": [{"first": 0, "ids": [1, 2, 3]}, {"first": 0, "ids": [5, 6, 7]}, {"first": 0, "ids": [9]}],
    "remote": [{"first": 0, "ids": [8, 7, 6]}, {"first": 0, "ids": [1, 2, 3]}, {"first": 0, "ids": [4]}],
}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``kvhma`` with some arguments; it is killed if it takes too long."""
    return subprocess.run(
        [sys.executable, "-c", "from kvhma.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "COLUMNS": "120"},
    )


# --- demo ------------------------------------------------------------------------------------------------------------


@pytest.mark.nixl
def test_demo_in_json() -> None:
    name = "granite-4.0-h-tiny"
    done = run("demo", "--json", "--model", name, "--requests", 2, "--tokens", 300)
    assert done.returncode == 0, done.stderr
    form = json.loads(done.stdout)
    assert form["kvhma_demo"] == 1
    found = form["models"]
    assert list(found) == [name]
    rows = found[name]
    assert [row["name"] for row in rows] == ["short prompt", "prefix hit"]
    for row in rows:
        assert row["verified"] is True
        assert row["counted"] is True
        assert row["wrong"] is None
        assert 0 < row["tokens"] <= 300
        assert row["moved"] == row["bytes"] > 0
        assert row["zeroed"] > 0
        assert row["bytes"] < row["whole_blocks"]["bytes"] <= row["whole_prompt"]["bytes"]
        assert row["descriptors"] <= row["whole_blocks"]["descriptors"] <= row["whole_prompt"]["descriptors"]
    # Every byte of D is one of three things, for every request.
    assert len({row["moved"] + row["zeroed"] + row["untouched"] for row in rows}) == 1
    assert done.stderr == ""


@pytest.mark.nixl
def test_demo_finds_a_spoilt_byte() -> None:
    done = cli("demo", "--json", "--model", "gpt-oss-20b", "--requests", 1, "--tokens", 300, "--corrupt")
    assert done.code == 1, done.err
    (row,) = done.form["models"]["gpt-oss-20b"]
    assert row["verified"] is False
    (line,) = [line for line in done.err.splitlines() if line.startswith("wrong byte: ")]
    assert line == f"wrong byte: gpt-oss-20b: short prompt: {row['wrong']}"
    place = (
        r"1 wrong bytes in region 0, .* \(model\.layers\.\d+\.self_attn\.attn/kv token \d+\): expected 0x.., found 0x"
    )
    assert re.search(place, line), line


@pytest.mark.nixl
def test_demo_ends_when_a_worker_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent waits neither for it nor for the other worker."""
    monkeypatch.setenv("UCX_TLS", "self")
    done = run("demo", "--model", "gpt-oss-20b", "--requests", 1, "--tokens", 100)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Error: cannot make NIXL agent 'prefill' with backends ['UCX']")
    assert "Traceback" not in done.stderr


def test_too_many_tokens() -> None:
    line = refused("demo", "--model", "granite-4.0-h-tiny", "--tokens", 9_999_999)
    wanted = (
        r"Error: granite-4\.0-h-tiny: 9999999 tokens need a cache of \d+ MiB, at most \d+ are used; try --tokens \d+"
    )
    assert re.fullmatch(wanted, line), line


@pytest.mark.parametrize(("option", "value"), [("--tokens", 0), ("--tokens", 10**9), ("--requests", 65)])
def test_numbers_out_of_range(option: str, value: int) -> None:
    assert refused("demo", option, value).startswith(
        f"Error: Invalid value for '{option}': {value} is not in the range"
        if option == "--requests"
        else f"Error: Invalid value for '{option}': '{value}': must be 1 to 10,000,000"
    )


# --- plan ------------------------------------------------------------------------------------------------------------


class Files:
    """The input files of `kvhma plan`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.local, self.remote = tiny_hybrid(10), tiny_hybrid(10, base=1 << 24)
        self.write("local", self.local.to_json())
        self.write("remote", self.remote.to_json())
        self.write("request", json.dumps({"num_tokens": TOKENS, **SPANS}).encode())

    def write(self, name: str, content: bytes) -> None:
        self.folder.joinpath(name).write_bytes(content)

    def arguments(self, **instead: object) -> list[object]:
        """Return the command; `instead` replaces files."""
        files = {name: self.folder / name for name in ("local", "remote", "request")} | instead
        return ["plan", *(word for name, path in files.items() for word in (f"--{name}", path))]

    def transfer(self, **options: Any) -> kvhma.Transfer:
        local, remote = ([kvhma.Span(**span) for span in SPANS[side]] for side in ("local", "remote"))
        return kvhma.plan(self.local, self.remote, **options).transfer(TOKENS, local, remote)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize(
    ("words", "options"), [([], {}), (["--descriptor-bytes", 0], {"descriptor_bytes": 0})], ids=["default", "exact"]
)
def test_plan_in_json(files: Files, words: list[object], options: dict[str, Any]) -> None:
    done = cli(*files.arguments(), "--json", *words)
    assert (done.code, done.err) == (0, "")
    transfer = files.transfer(**options)
    (read,) = transfer.reads
    ours, theirs = read.local.tolist(), read.remote.tolist()
    assert done.form == {
        "kvhma_request": 1,
        "bytes": transfer.bytes,
        "descriptors": transfer.descriptors,
        "excess_bytes": transfer.excess_bytes,
        "reads": [
            {
                "source": 0,
                "bytes": read.bytes,
                "descriptors": read.descriptors,
                "runs": [[to, at, size] for (to, size, _), (at, _, _) in zip(ours, theirs, strict=True)],
            }
        ],
        "zero": [[address, size] for address, size, _ in transfer.zero.tolist()],
        "findings": [],
    }
    assert bool(transfer.excess_bytes) == (not options)


def test_plan_addresses_by_hand(files: Files) -> None:
    """The first block of the first layer: block 1 of D from block 8 of P, 4,096 bytes each."""
    runs = cli(*files.arguments(), "--json").form["reads"][0]["runs"]
    assert runs[0] == [(1 << 20) + 4096, (1 << 24) + 8 * 4096, 4096]


def test_plan_with_two_sources(files: Files) -> None:
    """Each of them has one of the two layers of every group."""
    stages = [
        kvhma.Geometry(files.remote.regions, files.remote.groups, files.remote.layers[3 * stage : 3 * stage + 3])
        for stage in range(2)
    ]
    for stage, geometry in enumerate(stages):
        files.write(f"stage{stage}", geometry.to_json())
    words = files.arguments(remote=files.folder / "stage0")
    form = cli(*words, "--remote", files.folder / "stage1", "--json").form
    assert [read["source"] for read in form["reads"]] == [0, 1]
    whole = files.transfer().reads[0]
    runs = [one for read in form["reads"] for one in read["runs"]]
    assert sorted(runs) == [
        [to, at, size]
        for (to, size, _), (at, _, _) in zip(whole.local.tolist(), whole.remote.tolist(), strict=True)
    ]  # fmt: skip


def test_plan_prints_findings(files: Files) -> None:
    """D has a layer that P lacks: it is zeroed, and the findings report it."""
    lacking = kvhma.Geometry(files.remote.regions, files.remote.groups, files.remote.layers[:-1])
    files.write("lacking", lacking.to_json())
    words = files.arguments(remote=files.folder / "lacking")
    (finding,) = cli(*words, "--json").form["findings"]
    assert finding["source"] == 0
    assert "layers.5" in finding["text"]
    assert finding["text"] in " ".join(cli(*words).out.split())


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda form: form.pop(name)


def with_ids(side: str, group: int, *ids: object) -> Callable[[dict[str, Any]], object]:
    return lambda form: form[side][group].update(ids=list(ids))


def having(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda form: form.update({name: value})


BAD_REQUESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no-tokens": (without("num_tokens"), "field 'num_tokens' is missing"),
    "no-remote": (without("remote"), "field 'remote' is missing"),
    "no-first": (lambda form: form["local"][0].pop("first"), "field 'first' is missing"),
    "no-spans": (having("local", [1, 2, 3]), "a request is an object with lists of spans"),
    "two-spans": (lambda form: form["local"].pop(), "local spans has 2 entries, expected 3"),
    "0-tokens": (having("num_tokens", 0), "num_tokens"),
    "half-a-token": (having("num_tokens", 1.5), "num_tokens: 1.5 of type float"),
    "1e30-tokens": (having("num_tokens", 10**30), "num_tokens"),
    "negative-first": (lambda form: form["local"][0].update(first=-1), "local: first: -1"),
    "text-id": (with_ids("local", 0, 1, 2, "3"), "local: '3' of type str"),
    "id-twice": (with_ids("local", 0, 1, 2, 1), "local group 0"),
    "null-block": (with_ids("remote", 1, 1, 0, 3), "remote group 1: block id 0 at index 1 is the null block"),
    "id-too-large": (with_ids("remote", 2, 10), "remote group 2"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_plan_of_a_bad_request(files: Files, name: str) -> None:
    change, text = BAD_REQUESTS[name]
    form = json.loads((files.folder / "request").read_text())
    change(form)
    files.write("request", json.dumps(form).encode())
    line = refused(*files.arguments())
    assert line.startswith("Error: ")
    assert text in line


@pytest.mark.parametrize("name", ["local", "remote", "request"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe{", b"[" * 100_000], ids=["empty", "cut", "list", "binary", "deep"]
)
def test_plan_of_something_else(files: Files, name: str, content: bytes) -> None:
    files.write(name, content)
    assert refused(*files.arguments()).startswith("Error: ")


def test_plan_of_a_pair_that_does_not_fit(files: Files) -> None:
    text = files.remote.to_json().replace(b'"float32"', b'"bfloat16"')
    files.write("remote", text)
    line = refused(*files.arguments())
    assert "float32" in line
    assert "bfloat16" in line
