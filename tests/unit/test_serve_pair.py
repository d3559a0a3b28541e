# SPDX-License-Identifier: Apache-2.0
"""``kvhma serve-pair`` without engines: which processes it starts with which arguments."""

from __future__ import annotations

import json
import os
import re

import pytest

from kvhma.cli import serve_pair
from kvhma.versions import install_command
from support.cli_run import cli


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
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    asked = dict(zip(("prefill_tp", "decode_tp"), sizes, strict=True))
    assert serve_pair._cores_of("prefill", asked) == prefill
    assert serve_pair._cores_of("decode", asked) == decode


@pytest.mark.parametrize(("sizes", "share"), [((1, 1), "0.40"), ((1, 3), "0.20")])
def test_ranks_on_cpus_share_the_memory(monkeypatch, tmp_path, sizes, share):
    """By default each rank claims 92 % of the host's memory, and the second engine does not start."""
    of_engines = dict(zip(("prefill_tp", "decode_tp"), sizes, strict=True)) | dict.fromkeys(
        ("prefill_devices", "decode_devices")
    )
    given = ("--gpu-memory-utilization", "0.1")
    for on_cpus in (True, False):
        monkeypatch.setattr(serve_pair, "installed", lambda _, on_cpus=on_cpus: not on_cpus)
        for name in ("prefill", "decode"):
            command = serve_pair._engine(name, "m", given, 1, 2, tmp_path, of_engines, {}).command
            claims = [command[index + 1] for index, word in enumerate(command) if word == given[0]]
            assert claims == ([share] if on_cpus else []) + ["0.1"]  # of two vLLM takes the last


def test_both_engines_have_one_secret():
    drawn = [serve_pair.with_secret({"PATH": "/bin"}) for _ in range(2)]
    assert all(len(made["KVHMA_SECRET"]) == 64 and made["PATH"] == "/bin" for made in drawn)
    assert drawn[0]["KVHMA_SECRET"] != drawn[1]["KVHMA_SECRET"]
    assert serve_pair.with_secret({"KVHMA_SECRET": ""})["KVHMA_SECRET"]
    assert serve_pair.with_secret({"KVHMA_SECRET": "ours" * 4}) == {"KVHMA_SECRET": "ours" * 4}


@pytest.mark.parametrize(
    ("installed", "arguments", "module"),
    [
        ([], (), "kvhma.proxy"),
        (["vllm_router"], (), "vllm_router.launch_router"),
        (["vllm_router"], ("--front", "proxy"), "kvhma.proxy"),
    ],
)
def test_what_clients_ask(monkeypatch, tmp_path, installed, arguments, module):
    """vllm-router if it is installed; without it a line says how to get it."""
    known = [*installed, "vllm", "aiohttp"]
    monkeypatch.setattr(serve_pair.importlib.util, "find_spec", lambda name: name if name in known else None)
    ran = []
    monkeypatch.setattr(serve_pair, "run", lambda parts, ready: ran.extend(parts) or 1)
    done = cli("serve-pair", "m", "--port", 7, "--logs", tmp_path, *arguments)
    assert done.code == 1
    assert ("for vllm-router: pip install " in done.err) == (not installed)
    prefill, decode, front = ran
    command = " ".join(front.command)
    assert f"-m {module} " in command
    assert f"--port 7 --prefill http://{prefill.address} --decode http://{decode.address}" in command
    assert front.address == "127.0.0.1:7"
    assert all("--enable-prompt-tokens-details" in engine.command for engine in (prefill, decode))
    config = json.loads((tmp_path / "kvhma-prometheus.yml").read_text())
    (of_router,) = re.findall(r"--prometheus-port (\d+)", command) or [None]
    addresses = {"prefill": prefill.address, "decode": decode.address, "router": of_router and f"127.0.0.1:{of_router}"}
    scraped = {job["job_name"]: job["static_configs"] for job in config["scrape_configs"]}
    assert scraped == {name: [{"targets": [address]}] for name, address in addresses.items() if address}
    assert (of_router is None) == (module == "kvhma.proxy")


def test_missing_programs_are_named(monkeypatch):
    monkeypatch.setattr(serve_pair.importlib.util, "find_spec", lambda name: None)
    done = cli("serve-pair", "m")
    assert done.code == 2
    assert f"vllm is not installed: {install_command('vllm')}" in done.err
