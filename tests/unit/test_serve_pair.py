# SPDX-License-Identifier: Apache-2.0
"""``kvhma serve-pair`` without engines: which processes it starts with which arguments, and that it leaves nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import pytest

from kvhma.cli import serve_pair
from support.cli_run import cli
from support.waiting import until

TP = {"prefill_tp": 1, "decode_tp": 1}


@pytest.mark.parametrize(
    ("cores", "sizes", "prefill", "decode"),
    [
        ({0, 1}, (1, 1), "0", "1"),
        ({2, 3, 6, 7, 9}, (1, 1), "2,3", "6,7"),
        (set(range(8)), (1, 2), "0,1", "2,3|4,5"),
        ({0, 1}, (1, 2), "nobind", "nobind"),
    ],
)
def test_no_two_ranks_share_a_core(monkeypatch, cores, sizes, prefill, decode):
    """Formerly two engines whose threads spin on the same cores stalled for 55 s, and their loads failed."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    asked = dict(zip(("prefill_tp", "decode_tp"), sizes, strict=True))
    assert serve_pair._cores_of("prefill", asked) == prefill
    assert serve_pair._cores_of("decode", asked) == decode


def test_both_engines_have_a_new_secret_or_that_of_the_environment():
    drawn = [serve_pair.with_secret({"PATH": "/bin"}) for _ in range(2)]
    assert all(len(made["KVHMA_SECRET"]) == 64 and made["PATH"] == "/bin" for made in drawn)
    assert drawn[0]["KVHMA_SECRET"] != drawn[1]["KVHMA_SECRET"]
    assert serve_pair.with_secret({"KVHMA_SECRET": ""})["KVHMA_SECRET"]
    assert serve_pair.with_secret({"KVHMA_SECRET": "ours" * 4}) == {"KVHMA_SECRET": "ours" * 4}


def test_ports_are_different():
    ports = serve_pair.free_ports(20)
    assert len(set(ports)) == 20


def part(tmp_path: Path, name: str, code: str) -> serve_pair.Part:
    return serve_pair.Part(name, [sys.executable, "-c", code], os.environ, tmp_path / f"{name}.log")


SLEEPS_WITH_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_one_has_started_ends_with_it(tmp_path):
    log = tmp_path / "a.log"
    with serve_pair.running([part(tmp_path, "a", SLEEPS_WITH_A_CHILD)]) as processes:
        (process, _) = processes["a"]
        until(lambda: log.read_text())
        child = int(log.read_text())
        assert os.getpgid(child) == process.pid
        assert os.getsid(child) == os.getsid(0), "Linux would give each of two engines its time as a whole"
        serve_pair._check(processes)
    assert process.returncode is not None
    stat = Path(f"/proc/{child}/stat")
    until(lambda: not stat.exists() or "Z" in stat.read_text().split(")")[1][:3])


def test_one_that_ends_too_early_is_named_with_the_end_of_its_log(tmp_path, capsys):
    said = "; ".join(f"print({number})" for number in range(20))
    with serve_pair.running([part(tmp_path, "decode", f"{said}; raise SystemExit(3)")]) as processes:
        processes["decode"][0].wait(30)
        with pytest.raises(
            click.ClickException, match=r"the decode process has ended with code 3; its log is .*decode"
        ):
            serve_pair._check(processes)
    assert capsys.readouterr().err.split() == [str(number) for number in range(12, 20)]


def test_missing_programs_are_named(monkeypatch):
    monkeypatch.setattr(serve_pair.importlib.util, "find_spec", lambda name: None)
    done = cli("serve-pair", "m")
    assert done.code == 2
    assert "vllm is not installed: pip install 'kvhma[vllm]'" in done.err
