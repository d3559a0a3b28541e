# SPDX-License-Identifier: Apache-2.0
"""For any wrong input a command prints one printable line and exits with code 2."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from support.cli_configs import CONFIGS, NEMOTRON_3_NANO
from support.cli_run import cli, refused
from support.tiny import tiny_hybrid
from support.tries import TRIES

NANO = "NVIDIA-Nemotron-3-Nano-30B-A3B"


@pytest.mark.parametrize("command", ["plan", "explain"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["no/such/config.json"],
            "MODEL 'no/such/config.json': no such file or directory, and no built-in model (`kvhma models` lists them)",
        ),
        ([], "Missing argument 'MODEL'"),
        ([NANO, "--tokens", "-5"], "'--tokens': '-5': must be 1 to 4,194,304, as 8192, 8k (8,000) or 8K (8,192)"),
        ([NANO, "--tokens", "٣"], "must be 1 to 4,194,304"),
        ([NANO, "--tokens", "9" * 5000], "must be 1 to 4,194,304"),
        ([NANO, "--cached", "9000"], "--cached 9000: must be 0 to the 8,192 of --tokens"),
        ([NANO, "--prefill", "tp=3"], "--prefill: tp_size 3: "),
        ([NANO, "--decode", "tp=128"], "--decode: tp_size 128: query_heads 32 cannot be shared out evenly"),
        ([NANO, "--decode", "tp=-1"], "'--decode': tp=-1: must be 1 to 256"),
        ([NANO, "--decode", "tp=" + "9" * 5000], "must be 1 to 256"),
        ([NANO, "--decode", "dcp=2"], "'--decode': dcp=2: must be 1: the ranks of a context-parallel engine"),
        ([NANO, "--decode", "pp=53"], "--decode: pp_size 53: the model has 52 layers"),
        ([NANO, "--decode", "pp=52"], "--decode: pp_size 52: stage 1, layers 1 to 1, caches nothing"),
        ([NANO, "--decode", "tp=64,pp=8"], "'--decode': tp=64 and pp=8: 512 ranks, at most 256"),
        ([NANO, "--decode", "TP=1,tensor-parallel-size=2"], "tp is given twice"),
        ([NANO, "--decode", "kv=int3"], "kv=int3: must be one of auto, bf16"),
        ([NANO, "--decode", "kv=nvfp4"], "int8_per_token_head and nvfp4, cannot be planned"),
        ([NANO, "--decode", "layout=LHBNC"], "--decode: order 'LHBNC': a state page must be contiguous"),
        ([NANO, "--decode", "kernel=48"], "--decode: kernel_block 48: must divide the logical block of 2096"),
        (["gemma-3-4b", "--prefill", "block=7"], "--prefill: block_size 7: FlashInfer needs a multiple of 16"),
        (["\x1b[31mred\x00"], "MODEL '\\x1b[31mred"),
        (["a" * 5000], "no such file or directory"),
    ],
)
def test_arguments(command: str, arguments: list[str], text: str) -> None:
    assert text in refused(command, *arguments)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"{}",
        b'{"kvhma": 1}',
        b"1e999",
    ],
)
@pytest.mark.parametrize("command", ["plan", "explain"])
def test_invalid_files(command: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert str(path) in refused(command, path)


def test_other_files(tmp_path: Path) -> None:
    assert "config.json: No such file" in refused("plan", tmp_path)
    large = tmp_path / "large.json"
    with large.open("wb") as stream:
        stream.truncate(17 << 20)
    assert "more than 16 MiB" in refused("plan", large)
    (tmp_path / "g.json").write_bytes(tiny_hybrid(10).to_json())
    line = refused("plan", tmp_path / "g.json", "--tokens", 100_000)
    assert "--tokens 100000 takes" in line
    assert "the geometry has 9 besides the null block" in line
    assert "a geometry says all of an engine" in refused("plan", tmp_path / "g.json", "--decode", "tp=2")
    assert "--request needs --local and --remote" in refused("plan", "--request", tmp_path / "g.json")
    assert "not written by `kvhma bench link`" in refused("plan", NANO, "--link", tmp_path / "g.json")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("check", "absent.json"), "does not exist"),
        (("bench", "link", "--block", "3"), "'3': must be 8 bytes to 64.0 MiB"),
        (("bench", "link", "--save", "x", "--no-save"), "exclude each other"),
        (("explain", NANO, "--rank", "1"), "--rank 1: the decode engine has 1 rank"),
        (("explain", NANO, "--rank", "0-99999999"), "must be ranks of 0 to 255"),
    ],
)
def test_other_commands(arguments: tuple[str, ...], text: str) -> None:
    assert text in refused(*arguments)


@pytest.mark.parametrize("name", CONFIGS)
def test_mutated_configurations(name: str, tmp_path: Path) -> None:
    """Each field in turn is missing or wrong: the command plans, or refuses as JSON; never a traceback."""
    rng = random.Random(name)
    junk: list[Any] = [None, 0, -1, 2.5, 10**12, "x", [], {}, True, [1, 2], ["full_attention"], "auto", 7]
    path = tmp_path / "config.json"
    for field in _fields(CONFIGS[name]):
        for value in rng.sample(junk, min(3 * TRIES, len(junk))):
            form = deepcopy(CONFIGS[name])
            _set(form, field, value)
            path.write_text(json.dumps(form))
            done = cli("plan", path, "--tokens", 100, "--json")
            assert done.code in (0, 2), done
            if done.code == 2:
                assert done.form["kvhma_error"] == 1
                (line,) = done.form["text"].splitlines()
                assert "Traceback" not in line
                assert done.err == ""


def _fields(form: dict[str, Any], *before: str) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, value in form.items():
        found.append((*before, name))
        if isinstance(value, dict):
            found += _fields(value, *before, name)
    return found


def _set(form: dict[str, Any], field: tuple[str, ...], value: object) -> None:
    for name in field[:-1]:
        form = form[name]
    form[field[-1]] = value


def test_hostile_text_does_not_reach_the_terminal(tmp_path: Path) -> None:
    form = {**NEMOTRON_3_NANO, "model_type": "\x1b]0;owned\x07", "architectures": ["\x1b[2J"]}
    (tmp_path / "config.json").write_text(json.dumps(form))
    said = refused("plan", tmp_path)
    assert "is not known" in said
    assert not {"\x1b", "\x07"} & set(said)
    text = tiny_hybrid(40).to_json().decode().replace("layers.0", "\\u001b[2J\\u0007[bold]")
    (tmp_path / "g.json").write_text(text)
    for command in ("plan", "explain"):
        done = cli(command, tmp_path / "g.json", "--tokens", 50)
        assert done.code == 0, done.err
        assert "\x1b" not in done.out
        assert "\x07" not in done.out
    (tmp_path / "h.json").write_bytes(tiny_hybrid(40).to_json())
    done = cli("explain", "--local", tmp_path / "g.json", "--remote", tmp_path / "h.json", "--tokens", 50)
    assert (done.code, "\x1b" in done.out, "[bold]" in done.out) == (0, False, True)
