# SPDX-License-Identifier: Apache-2.0
"""The command line at its edges: narrow terminals, mistyped keys, errors with ``--json``, a pipe as MODEL."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvhma.cli import doctor
from kvhma.cli.checks import Row
from support.cli_configs import NEMOTRON_3_NANO
from support.cli_run import cli, refused
from support.tiny import tiny_hybrid

PAIR = ("google/gemma-3-27b-it", "--prefill", "tp=2", "--decode", "tp=4")
NUMBER = re.compile(r"\d[\d,.]*(?: (?:[KMGT]iB|B|s|ms|µs)\b)?")


# --- 60 columns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 60, 72, 80, 120])
@pytest.mark.parametrize(
    "command",
    [
        ("plan", *PAIR, "--tokens", "64k"),
        ("models",),
        ("cost", *PAIR),
    ],
    ids=lambda command: command[0],
)
def test_no_number_is_broken(command: tuple[str, ...], columns: int) -> None:
    """A narrow terminal shows the same numbers with their units as a wide one, and no pieces of them."""
    wide, narrow = (cli(*command, columns=width).out for width in (400, columns))
    assert set(NUMBER.findall(wide)) == set(NUMBER.findall(narrow))


# --- python -m kvhma -------------------------------------------------------------------------------------------------


def test_the_package_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "kvhma", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("kvhma, version ")


# --- errors as JSON --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("plan", "nope", "--json"), "unknown-model", "no built-in model"),
        (("plan", "gemma-3-4b", "--json", "--tokens", "0"), "usage", "--tokens"),
        (("plan", "gemma-3-4b", "--json", "--prefill", "tp=0"), "usage", "tp=0"),
        (("cost", "/none", "--json"), "unknown-model", "'/none'"),
        (("explain", "--json"), "usage", "MODEL"),
        (("explain", "--json", "--"), "usage", "MODEL"),
    ],
)
def test_an_error_is_json_too(arguments: tuple[str, ...], code: str, text: str) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert done.err == ""
    assert {name: done.form[name] for name in ("kvhma_error", "code")} == {"kvhma_error": 1, "code": code}
    assert text in done.form["text"]


def test_options_of_engines_do_not_ask_for_json() -> None:
    assert "'0'" in refused("serve-pair", "m", "--port", "'0'", "--", "--json")


# --- doctor --for ----------------------------------------------------------------------------------------------------


def doctor_rows(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[str]]:
    monkeypatch.setattr(doctor, "requirements", lambda *_extra: [])
    monkeypatch.setattr(doctor, "installed", lambda *_names: None)
    monkeypatch.setattr(doctor, "look_at_host", lambda: [Row("memlock", "ok", "unlimited")])
    done = cli("doctor", "--json", *arguments)
    return done.code, [row["name"] for row in done.form["checks"]]


def test_a_laptop_without_engines_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_rows(monkeypatch, "--for", "cli") == (0, ["kvhma", "command line"])
    assert doctor_rows(monkeypatch, "--for", "library") == (1, ["kvhma", "command line", "memlock", "NIXL"])
    everything = (1, ["kvhma", "command line", "memlock", "NIXL", "vLLM", "connector"])
    assert doctor_rows(monkeypatch, "--for", "vllm") == doctor_rows(monkeypatch) == everything


@pytest.mark.parametrize(
    ("versions", "state", "found"),
    [
        ({}, "ok", "numpy 1.24, click 8.10.0, rich 15.0.0"),
        ({"click": "8.3.2"}, "failed", "needed: click >= 8.3.3"),
        ({"numpy": "1.23.9", "rich": "12.6"}, "failed", "needed: numpy >= 1.24, rich >= 13"),
        ({"rich": None}, "missing", "rich not installed"),
    ],
)
def test_packages_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], state: str, found: str
) -> None:
    of: dict[str, str | None] = {"numpy": "1.24", "click": "8.10.0", "rich": "15.0.0", **versions}
    needed = {"": ["numpy>=1.24"], "cli": ["click>=8.3.3", "rich>=13,<20"]}
    monkeypatch.setattr(doctor, "requirements", lambda extra="": needed[extra])
    monkeypatch.setattr(doctor, "installed", lambda name: (name, of[name]) if of.get(name) else None)
    done = cli("doctor", "--for", "cli", "--json")
    row = done.form["checks"][1]
    assert (row["name"], row["state"], done.code) == ("command line", state, 0 if state == "ok" else 1)
    assert row["found"].endswith(found)
    assert bool(row["fix"]) == (state != "ok")
    assert not row["fix"] or row["fix"] == "pip install 'numpy>=1.24' 'click>=8.3.3' 'rich>=13,<20'"


@pytest.mark.parametrize(("package", "state"), [("0.0.9", "failed"), ("1.0.0rc2", "ok"), ("1.0.0", "failed")])
def test_the_extension_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch, package: str, state: str) -> None:
    """An update that was stopped in the middle leaves files of two versions. Cargo writes rc2 as -rc.2."""
    monkeypatch.setattr(doctor, "__version__", "1.0.0-rc.2")
    monkeypatch.setattr(doctor, "requirements", lambda *_extra: [])
    monkeypatch.setattr(doctor, "installed", lambda name: (name, package))
    done = cli("doctor", "--for", "cli", "--json")
    assert (done.form["checks"][0]["state"], done.code) == (state, 0 if state == "ok" else 1)
    assert package in done.form["checks"][0]["found"] or state == "ok"


# --- keys and items --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "meant"),
    [
        ("pt=2", "tp"),
        ("blok=16", "block"),
        ("tensor-paralel-size=2", "tensor_parallel_size"),
        ("kernal=64", "kernel"),
        ("layuot=HND", "layout"),
    ],
)
def test_a_mistyped_key(item: str, meant: str) -> None:
    assert refused("plan", "gemma-3-4b", "--prefill", item).endswith(f"Did you mean {meant}?")


@pytest.mark.parametrize("text", ["tp=2,,block=16", "tp=2,", ",tp=2", "", " , "])
def test_an_empty_item(text: str) -> None:
    assert "has an empty item" in refused("plan", "gemma-3-4b", "--prefill", text)


# --- a pipe as MODEL -------------------------------------------------------------------------------------------------


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def test_a_config_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "stdin" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(NEMOTRON_3_NANO))
    for command in ("plan", "explain"):
        pipe(monkeypatch, config.read_bytes())
        assert cli(command, "-", "--json").form == cli(command, config, "--json").form


def test_a_geometry_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, tiny_hybrid(10).to_json())
    assert cli("plan", "-", "--json", "--tokens", 32).form["bytes"] > 0


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "-: not JSON"),
        (b"[]", "-: a list"),
        (b'{"kvhma": 1}', "-: "),
        (b"{}", "-: "),
        (b" " * ((16 << 20) + 1), "-: more than 16 MiB"),
    ],
    ids=["empty", "list", "geometry", "config", "long"],
)
def test_a_wrong_pipe(data: bytes, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, data)
    assert f"Error: {text}" in refused("plan", "-")
