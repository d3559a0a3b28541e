# SPDX-License-Identifier: Apache-2.0
"""``kvhma serve-pair`` with real engines: one command, an answer through both, and nothing left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import free_port
from support.engines.zygote import ENVIRONMENT, REPO, engine_python
from support.handoff import prompts
from support.tokenizer import with_tokenizer
from support.waiting import until

Models = Callable[[str], Path]

OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20))


# As a user's: without settings for threads and cores.
SEEN = {name: value for name, value in ENVIRONMENT.items() if "THREADS" not in name}


def command(*arguments: object) -> list[str]:
    return [engine_python(), "-c", "from kvhma.cli import main; main()", "serve-pair", *map(str, arguments)]


def test_one_command_serves_a_pair(model: Models, tmp_path: Path) -> None:
    served = with_tokenizer(model("llama"), tmp_path / "model")
    port = free_port()
    started = [*command("--port", port, "--logs", tmp_path / "logs", served), *OPTIONS]
    with subprocess.Popen(
        started, env={**os.environ, **SEEN}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as pair:
        try:
            said = [pair.stdout.readline() for _ in range(5)]
            assert said[0] == f"ready: http://127.0.0.1:{port}/v1\n", pair.stderr.read()
            (prompt,) = prompts("pair", [101])
            body = {"model": str(served), "prompt": prompt, "max_tokens": 4, "temperature": 0}
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            answer = json.load(urllib.request.urlopen(asked, timeout=60))
            assert answer["usage"]["completion_tokens"] == 4
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "as of one engine: P had none"
            metrics = re.search(r"http://\S+/metrics", said[2])[0]
            lines = urllib.request.urlopen(metrics, timeout=10).read().decode().splitlines()
            loads = [line for line in lines if line.startswith("vllm:kvhma_load_seconds_count")]
            assert [float(line.split()[-1]) for line in loads] == [1.0]
            children = of_group_leaders(pair.pid)
            assert len(children) == 4, "P, D, the proxy, and the process that ends them if this one is killed"
        finally:
            pair.send_signal(signal.SIGTERM)
            pair.wait(60)
    assert pair.returncode == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@pytest.mark.long
@pytest.mark.skipif(not (REPO / "models").is_dir(), reason="make real-model writes a real model")
def test_the_start_page_ends_with_its_answer(tmp_path: Path) -> None:
    """The command for CPUs, and the request as it is on the page, but for the port."""
    page = (REPO / "docs/start.md").read_text(encoding="utf-8")
    (started,) = re.findall(r"^kvhma serve-pair (.* --dtype float32 .*)$", page, re.MULTILINE)
    asked, shown = re.search(
        r"^(curl .*/chat/completions .*)\n```\n[^`]*`content`:\n\n```text\n(.*)\n```$", page, re.M
    ).groups()
    port = free_port()
    with subprocess.Popen(
        [*command("--port", port, "--logs", tmp_path / "logs"), *started.split()],
        env={**os.environ, **SEEN},
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    ) as pair:
        try:
            said = [pair.stdout.readline() for _ in range(5)]
            run = subprocess.run(shlex.split(asked.replace(":8000", f":{port}")), capture_output=True, check=True)
            assert json.loads(run.stdout)["choices"][0]["message"]["content"] == shown
            (look,) = re.findall(r"curl -s http://.*", said[2])
            counted = subprocess.run(look, shell=True, capture_output=True, text=True, check=True).stdout
            assert counted.split()[-1] == "1.0", "the page's number"
            if shutil.which("prometheus"):
                assert scraped(page, said[3].split()[-1], tmp_path) == {"prefill": "1", "decode": "1"}
        finally:
            pair.send_signal(signal.SIGTERM)
            pair.wait(60)
    assert pair.returncode == 0


def scraped(page: str, config: str, folder: Path) -> dict[str, str]:
    """Run the page's Prometheus at another port until its graphs have data; return which processes it reaches."""
    (words,) = re.findall(r"^prometheus (.*)$", page, re.MULTILINE)
    (graphs,) = re.findall(r"\(http://127\.0\.0\.1:9091/graph\?(.*)\)", page)
    asked = [values[0] for name, values in urllib.parse.parse_qs(graphs).items() if name.endswith(".expr")]
    assert len(asked) == 2
    address = f"127.0.0.1:{free_port()}"
    own = {
        "$PROMETHEUS_CONFIG": config,
        "path=metrics": f"path={folder / 'metrics'}",
        "127.0.0.1:9091": address,
    }
    for old, new in own.items():
        assert old in words
        words = words.replace(old, new)
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *words.split()], stdout=log, stderr=log)
    try:

        def found(query: str) -> list[dict[str, Any]]:
            url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
                return list(json.load(answer)["data"]["result"])
            return []

        until(lambda: all(map(found, asked)), lambda: time.sleep(0.5))
        with urllib.request.urlopen(f"http://{address}/graph?{graphs}", timeout=10) as page_of_graphs:
            assert page_of_graphs.url.endswith(graphs), "a redirection keeps the queries"
        return {one["metric"]["job"]: one["value"][1] for one in found("up")}
    finally:
        process.terminate()
        process.wait(30)


def of_group_leaders(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_engine_that_cannot_start_ends_the_others(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--port", free_port(), "--logs", tmp_path, tmp_path / "none"),
        env={**os.environ, **SEEN},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert re.search(r"the (prefill|decode) process has ended with code 1; its log is \S+\.log", done.stderr)
