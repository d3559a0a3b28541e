# SPDX-License-Identifier: Apache-2.0
"""Untrusted trace files: each is judged or refused, fast, and in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhma.errors import RequestError
from kvhma.oracle.audit import audit
from kvhma.oracle.traces import MAX_ROWS, Trace
from support.cli_run import cli

SECONDS = 40
"""Seconds of the processor, far more than any of them needs."""


def side(layers: int = 1, *, base: int = 4096, blocks: int = 8, parts: int = 1, block_size: int = 0) -> Any:
    """Layers of one-byte tokens that all share the same memory; of an opaque group where `block_size` is given."""
    axes = [{"name": "content" if block_size else "tokens", "extent": 4, "stride": 1}]
    forms = [
        {"name": f"p{at}", "dtype": "uint8", "item_bytes": 1, "offset": 4 * at, "axes": axes} for at in range(parts)
    ]
    place = {"group": 0, "page": 0, "region": 0, "offset": 0, "num_blocks": blocks, "block_stride": 4 * parts}
    return {
        "kvhma": 1,
        "regions": [{"base": base, "bytes": 4 * parts * blocks}],
        "groups": [{"kind": "opaque" if block_size else "full", "block_size": block_size or 4}],
        "pages": [{"parts": forms}],
        "layers": [{"name": f"l{at}", **place} for at in range(layers)],
    }


def head(**sides: Any) -> str:
    return json.dumps({"kvhma_trace": 1, "local": [side(**sides)], "remote": [side(base=1 << 30, **sides)]})


def request(**more: Any) -> str:
    spans = [{"first": 0, "ids": [1]}]
    return json.dumps({"request": "r", "num_tokens": 4, "local_spans": spans, "remote_spans": spans} | more)


def rows(*rows: tuple[int, ...], doing: str = "transfer") -> str:
    source = {"source": 0} if doing == "transfer" else {}
    return json.dumps({doing: "r", "rank": 0, **source, "rows": rows})


RIGHT = (1 << 30) + 4, 4100, 4
TOP = (1 << 64) - 1

FAR = [{"first": 1 << 21, "ids": [1]}]
ZEROS = '{"zero": "r", "rank": 0, "rows": ['

REFUSED: dict[str, Callable[[], list[str]]] = {
    "layers by the thousand on one memory": lambda: [
        head(layers=4096, blocks=1 << 18), request(), rows((1 << 30, 4096, 1))
    ],
    "tokens by the million without a block": lambda: [
        head(), request(num_tokens=1 << 26, cached_spans=[{"first": 0, "ids": []}])
    ],
    "a label that two parts have": lambda: [
        head(block_size=1 << 24), request(local_spans=FAR, remote_spans=FAR)
    ],
    "parts by the million": lambda: [head(layers=4096, parts=16), request()],
    "one step of 2 GiB": lambda: [head(), request(), rows(*[(1 << 30, 4096, 32)] * 999, (1 << 30, 4096, 1 << 31))],
    "steps of 32 MiB without an end": lambda: [head(), request(), *[rows((1 << 30, 1 << 41, 1 << 25))] * 5],
    "rows that add up to nothing": lambda: [head(), request(), rows(*[(1 << 30, 4096, 1 << 63)] * 2)],
    "a row more than there may be": lambda: [head(), request(), ZEROS + "[0,0]," * MAX_ROWS + "[0,0]]}"],
    "invalid rows": lambda: [head(), request(), ZEROS + "0," * (1 << 22) + "0]}"],
    "a number of many digits": lambda: [head(), request(), rows().replace("[]", "[[" + "9" * 100_000 + ", 1, 1]]")],
    "a number above 64 bits": lambda: [head(), request(), rows((1 << 64, 4096, 1))],
    "a number below 0": lambda: [head(), request(), rows((1 << 30, 4096, -1))],
    "not a number": lambda: [head(), request(), rows().replace("[]", "[[NaN, 1, 1]]")],
    "infinity": lambda: [head().replace("4096", "Infinity"), request()],
    "true as a rank": lambda: [head(), request(), rows(RIGHT).replace('"rank": 0', '"rank": true')],
    "a rank with a fraction": lambda: [head(), request(), rows(RIGHT).replace('"rank": 0', '"rank": 0.0')],
    "lists in lists": lambda: ["[" * 4_000_000],
    "lists in a geometry": lambda: [head().replace("4096", "[" * 900 + "]" * 900), request()],
    "objects in a request": lambda: [head(), '{"request": ' + '{"a": ' * 2000 + "1" + "}" * 2000 + "}"],
    "rows as an object": lambda: [head(), request(), '{"zero": "r", "rank": 0, "rows": {"0": [1, 1]}}'],
    "an invalid name": lambda: [head(), request(request=None)],
    "65 ranks": lambda: [json.dumps({"kvhma_trace": 1, "local": [side()] * 65, "remote": [side()]})],
    "257 requests": lambda: [head(), *(request(request=str(at)) for at in range(257))],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    begin = time.process_time()
    with pytest.raises(RequestError) as info:
        audit(Trace.from_lines(REFUSED[name]()))
    assert len(str(info.value)) < 5000
    assert time.process_time() - begin < SECONDS


JUDGED: dict[str, tuple[Callable[[], list[str]], str]] = {
    "rows on each other": (lambda: [rows(*[RIGHT] * 1000)], "right"),
    "rows on each other of other bytes": (lambda: [rows(RIGHT, (1 << 30, 4100, 4))], "wrong"),
    "a row through the end of all addresses": (lambda: [rows(RIGHT, (1 << 30, TOP, 20_000))], "wrong"),
    "a row from the end of all addresses": (lambda: [rows(RIGHT, (TOP - 1, 4100, 4))], "wrong"),
    "zeros at the end of all addresses": (lambda: [rows(RIGHT), rows((TOP, 1), doing="zero")], "wrong"),
    "rows of no bytes": (lambda: [rows(RIGHT, *[(TOP, TOP, 0)] * 1000)], "right"),
    "a step to a line": (lambda: [rows(RIGHT)] + [rows((4100, 4100, 4), doing="rearrange")] * 20_000, "right"),
    "a transfer to a line": (lambda: [rows(RIGHT)] * 20_000, "right"),
    "steps of nothing": (lambda: [rows(RIGHT)] + [rows(doing="zero")] * 20_000, "right"),
    "a million rows": (lambda: [rows(RIGHT, *[RIGHT] * 100_000)], "right"),
}


@pytest.mark.parametrize("name", JUDGED)
def test_judged_traces(name: str) -> None:
    made, outcome = JUDGED[name]
    begin = time.process_time()
    ((_, found),) = audit(Trace.from_lines([head(), request(), *made()]))
    assert found.outcome == outcome
    assert time.process_time() - begin < SECONDS


def test_layers_on_one_memory_are_judged() -> None:
    """Each byte belongs to 4096 layers, and the last layer decides what it holds."""
    ((_, found),) = audit(Trace.from_lines([head(layers=4096, blocks=64), request(), rows(RIGHT, (1 << 30, 4096, 1))]))
    assert found.outcome == "wrong"
    assert len(found.causes) <= 12


def test_untrusted_names_are_printed_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    name = "r\x1b[2J\n\ud800\u202e"
    spoiled = [json.loads(line) for line in (request(), rows((1 << 30, 4100, 4)))]
    lines = [json.dumps(form | {key: name for key in ("request", "transfer") if key in form}) for form in spoiled]
    path.write_text("\n".join([head(), *lines]))
    done = cli("audit", path)
    assert done.code == 1
    assert "\x1b" not in done.out
    assert done.out.splitlines()[0].startswith("wrong ")
    assert cli("audit", "--json", path).code == 1


def test_memory_is_bounded(tmp_path: Path) -> None:
    """The largest trace that is simulated, and refused traces, in 4 GiB."""
    path = tmp_path / "trace.jsonl"
    for lines in (
        REFUSED["layers by the thousand on one memory"](),
        REFUSED["tokens by the million without a block"](),
        [head(blocks=1 << 22), request(), rows((1 << 30, 4096, 1 << 24), RIGHT)],
        [head(), request(), ZEROS + "[]," * (1 << 23) + "[]]}"],
    ):
        path.write_text("\n".join(lines))
        command = (
            "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30));"
            "from kvhma.cli import main; sys.argv[0] = 'kvhma'; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", command, "audit", path], capture_output=True, text=True, check=False
        )
        assert done.returncode in (1, 2), done.stderr[-2000:]
        assert "Traceback" not in done.stderr
