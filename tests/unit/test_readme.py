# SPDX-License-Identifier: Apache-2.0
"""The README's commands do what it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from support.cli_configs import NEMOTRON_3_NANO
from support.cli_run import cli

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_screen_has_the_two_commands() -> None:
    """The job and the tests, each one command, and how a pair is served; `.ci/run` reads the two from here."""
    first = TEXT.splitlines()[:15]
    assert [line.split("#")[0].strip() for line in first if line.startswith("make ")] == ["make demo", "make test"]
    served = [line for line in first if line.startswith("vllm serve MODEL ")]
    assert [re.findall(r'"kv_role": "(\w+)"', line) for line in served] == [["kv_producer"], ["kv_consumer"]]
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    (reads,) = re.findall(r"< <\((.*)\)$", script, re.MULTILINE)
    read = subprocess.run(["bash", "-c", reads], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert read.splitlines() == ["make demo", "make test"]
    assert 'for command in "${commands[@]}"; do $command; done' in script


def test_the_trace_shows_a_wrong_byte() -> None:
    (command,) = re.findall(r"`kvhma (audit [^`]+)`", TEXT)
    name, path = command.split()
    done = cli(name, ROOT / path)
    assert done.code == 1
    assert done.out.startswith("wrong")


def test_commands_need_no_engine_gpu_or_network(tmp_path: Path) -> None:
    """The command that the README shows, where packages of engines are missing and every socket is refused."""
    line = next(line for line in TEXT.splitlines() if line.startswith("$ kvhma plan"))
    words = line.split()[2:]
    (tmp_path / words[1]).mkdir()
    (tmp_path / words[1] / "config.json").write_text(json.dumps(NEMOTRON_3_NANO))
    code = (
        "import socket, sys\n"
        "def refuse(*_, **__): raise OSError('no network')\n"
        "socket.socket.connect = socket.socket.bind = socket.getaddrinfo = refuse\n"
        "for name in ('torch', 'vllm', 'nixl', 'nixl_cu12', 'transformers'): sys.modules[name] = None\n"
        "from kvhma.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "what is read" in done.stdout
