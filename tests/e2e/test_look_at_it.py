# SPDX-License-Identifier: Apache-2.0
"""``kvhma serve-pair`` with real engines, and what looks at them: doctor, export, traces, a real Prometheus."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from kvhma import Geometry
from support.cli_run import cli
from support.engines import free_port
from support.engines.zygote import ENVIRONMENT, REPO, engine_python
from support.handoff import prompts
from support.monitoring import EXAMPLES, alert_queries, dashboard_queries, metrics_of
from support.tokenizer import with_tokenizer
from support.waiting import until

Models = Callable[[str], Path]

OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20))
PROMETHEUS = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus: apt-get install prometheus")


@contextmanager
def serve_pair(*arguments: object, **environment: str) -> Iterator[tuple[int, list[str]]]:
    """`kvhma serve-pair` as a user starts it, without settings for threads and cores: its process and the lines that
    it prints. It ends well, with all that it has started."""
    seen = {name: value for name, value in ENVIRONMENT.items() if "THREADS" not in name}
    command = [engine_python(), "-c", "from kvhma.cli import main; main()", "serve-pair", *map(str, arguments)]
    started: list[int] = []
    with subprocess.Popen(
        command, env={**os.environ, **seen, **environment}, cwd=REPO, stdout=PIPE, stderr=PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(5)]
            assert said[0].startswith("ready:"), process.stderr.read() if process.stderr else ""
            started += children(process.pid)
            yield process.pid, said
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert process.returncode == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass(frozen=True)
class Pair:
    """The processes of ``kvhma serve-pair``: the model, and the ports of each process; `side` of P and D."""

    model: str
    proxy: int
    http: dict[str, int]
    side: dict[str, int]
    traces: list[bytes]
    """What the engines have sent to their collector of traces."""

    def ask(self, prompt: list[int], port: int | None = None, traceparent: str = "", **more: Any) -> bytes:
        """Ask the proxy, or another port."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
        url = f"http://127.0.0.1:{port or self.proxy}/v1/completions"
        headers = {"Content-Type": "application/json"} | ({"traceparent": traceparent} if traceparent else {})
        asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
        answer: bytes = urllib.request.urlopen(asked, timeout=60).read()
        return answer

    def complete(self, prompt: list[int]) -> dict[str, Any]:
        """Return an answer of the proxy."""
        answer: dict[str, Any] = json.loads(self.ask(prompt))
        return answer

    def stream(self, prompt: list[int]) -> None:
        """Read a stream of the proxy."""
        assert b"[DONE]" in self.ask(prompt, stream=True)


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a collector of traces, and the traces that it received."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            got.append(gzip.decompress(data) if self.headers["Content-Encoding"] == "gzip" else data)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
        server.shutdown()


@pytest.fixture(scope="module")
def pair(zygote: object, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    make: Models = request.getfixturevalue("model")
    served, port = with_tokenizer(make("gemma3"), folder / "model"), free_port()
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "500"}
    with pytest.MonkeyPatch.context() as patched, collector() as (endpoint, traces):
        patched.setenv("KVHMA_SECRET", "a secret of the pair and of the commands")
        arguments = ("--port", port, "--front", "proxy", "--logs", folder / "logs", served, *OPTIONS)
        with serve_pair(*arguments, "--otlp-traces-endpoint", endpoint, **environment) as (pid, said):
            assert said[0] == f"ready: http://127.0.0.1:{port}/v1\n"
            assert len(children(pid)) == 4, "P, D, the proxy, and the process that ends them if this one is killed"
            http, side = ports(pid)
            assert re.search(r"http://\S+/metrics", said[2])[0] == f"http://127.0.0.1:{http['D']}/metrics"
            yield Pair(str(served), port, http, side, traces)


def ports(pid: int) -> tuple[dict[str, int], dict[str, int]]:
    """The ports of the engines' servers and of their side channels, by P and D, from how they were started."""
    http, side = {}, {}
    for child in children(pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "--kv-transfer-config" in words:
            config = json.loads(words[words.index("--kv-transfer-config") + 1])
            name = {"kv_producer": "P", "kv_consumer": "D"}[config["kv_role"]]
            side[name] = config["kv_connector_extra_config"]["side_channel_port"]
            http[name] = int(words[words.index("--port") + 1])
    return http, side


def test_doctor_reaches_a_live_engine(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and null blocks are read, while requests continue; their answers do not change."""
    (prompt, again) = prompts("look", [101, 101])
    first = pair.complete(prompt)
    done = cli("doctor", "--peer", f"localhost:{pair.side['P']}", "--read", "--json")
    rows = {row["name"]: row for row in done.form["checks"] if row["name"].startswith("peer")}
    assert {row["state"] for row in rows.values()} == {"ok"}, rows
    assert pair.model in rows["peer: model"]["found"]
    assert "sliding" in rows["peer: geometry"]["found"]
    assert "of the null block" in rows["peer: read"]["found"]
    assert pair.complete(prompt)["choices"] == first["choices"]
    before = metrics(pair.http["D"], "vllm:kvhma_load_seconds_count")
    pair.complete(again)
    until(lambda: metrics(pair.http["D"], "vllm:kvhma_load_seconds_count") != before)


def test_what_is_exported_is_what_runs(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """plan, explain, map and diff read the geometries of both engines; each has vLLM's sizes of its blocks."""
    monkeypatch.chdir(tmp_path)
    for name in ("P", "D"):
        assert cli("export", f"127.0.0.1:{pair.side[name]}", "-o", f"{name}.json").code == 0
        geometry = Geometry.from_json(Path(f"{name}.json").read_bytes())
        info = metrics(pair.http[name], "vllm:cache_config_info{")
        assert f'num_gpu_blocks="{geometry.layers[0].num_blocks}"' in info
    both = ("--local", "D.json", "--remote", "P.json")
    planned = cli("plan", *both, "--tokens", 500, "--json")
    assert planned.code == 0
    assert planned.form["bytes"] > 0
    assert cli("explain", *both).code == 0


def metrics(port: int, start: str = "") -> str:
    lines = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode().splitlines()
    return "\n".join(line for line in lines if line.startswith(start))


def test_a_load_is_in_the_clients_trace(pair: Pair) -> None:
    """All six spans come with the trace's id; a request without a header has no spans."""
    (plain, prompt) = prompts("traced", [120, 130])
    names = [b"kvhma.load", *(b"kvhma." + name for name in (b"claim", b"plan", b"post", b"read", b"check"))]
    pair.ask(plain)
    trace = random.randbytes(16)
    pair.ask(prompt, traceparent=f"00-{trace.hex()}-{random.randbytes(8).hex()}-01")
    until(lambda: all(any(name in data for data in pair.traces) for name in (*names, b"llm_request")))
    (data,) = [data for data in pair.traces if names[0] in data]
    assert data.count(trace) >= 6
    assert [data.count(name) for name in names] == [1] * len(names)


def test_every_metric_that_is_named_is_there(pair: Pair) -> None:
    """Metrics with a label may have no sample yet, but have their type."""
    lines = metrics(pair.http["D"], "# TYPE")
    known: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", lines, re.MULTILINE):
        plain = name.removesuffix("_total")
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(kind, [""])
        known |= {plain + suffix for suffix in suffixes}
    for place, query in (*dashboard_queries(), *alert_queries()):
        of_engines = {name for name in metrics_of(query) if not name.startswith("vllm_router_")}
        assert of_engines <= known, place


@contextmanager
def prometheus(words: Sequence[object], folder: Path) -> Iterator[str]:
    """The address of a Prometheus that runs with these options."""
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("wb") as log:
        command = [str(PROMETHEUS), *map(str, words), f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        yield f"http://{address}/api/v1/"
    finally:
        process.terminate()
        process.wait(30)


def get(url: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
        form = json.load(answer)
    assert form["status"] == "success", form
    return form["data"]


@needs_prometheus
def test_the_dashboard_shows_hand_offs(pair: Pair, tmp_path: Path) -> None:
    """Every query is evaluated over live engines, and has data if its metrics have samples; a failed load alerts."""
    # The example's configuration, at other ports and every second.
    config = (EXAMPLES / "prometheus/prometheus.yml").read_text()
    for old, new in ((8100, pair.http["P"]), (8200, pair.http["D"])):
        config = config.replace(f"localhost:{old}", f"127.0.0.1:{new}")
    (tmp_path / "prometheus.yml").write_text(config.replace("interval: 10s", "interval: 1s"))
    shutil.copy(EXAMPLES / "prometheus/kvhma-alerts.yml", tmp_path)
    options = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with prometheus(options, tmp_path) as api:

        def shown() -> dict[tuple[str, str], list[Any]]:
            found = {}
            for title, query in dashboard_queries():
                asked = query.replace("$__rate_interval", "30s").replace("$instance", ".*").replace("$model", ".*")
                found[title, query] = get(api + "query", query=asked)["result"]
            return found

        def moved() -> set[str]:
            return {title for (title, _), of in shown().items() if any(float(one["value"][1]) > 0 for one in of)}

        def wrong() -> list[tuple[str, str]]:
            """Queries that have data although their metrics have no samples, or none although they have."""
            samples = set(re.findall(r"^[\w:]+", "\n".join(map(metrics, pair.http.values())), re.MULTILINE))
            return [key for key, of in shown().items() if bool(of) != (set(metrics_of(key[1])) <= samples)]

        until(lambda: ready(api))
        more = itertools.count(90)
        until(
            lambda: {"Loads", "Bytes", "Tokens", "Load", "Tokens of prompts", "Bytes of a group"} <= moved(),
            lambda: [of(*prompts("dashboard", [next(more)])) for of in (pair.complete, pair.stream)],
        )
        failing = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "127.0.0.1", "remote_port": 1}
        pair.ask([1, 2, 3, 4, 5], pair.http["D"], kv_transfer_params=failing)
        until(lambda: get(api + "query", query="vllm:kvhma_failed_loads_total")["result"])
        until(lambda: not wrong())
        until(lambda: "KvhmaLoadsFail" in firing(api))
        assert firing(api) == {"KvhmaLoadsFail"}


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
    with serve_pair("--port", port, "--logs", tmp_path / "logs", *started.split()) as (_, said):
        run = subprocess.run(shlex.split(asked.replace(":8000", f":{port}")), capture_output=True, check=True)
        assert json.loads(run.stdout)["choices"][0]["message"]["content"] == shown
        (look,) = re.findall(r"curl -s http://.*", said[2])
        counted = subprocess.run(look, shell=True, capture_output=True, text=True, check=True).stdout
        assert counted.split()[-1] == "1.0", "the page's number"


def ready(api: str) -> bool:
    try:
        targets = get(api + "targets")["activeTargets"]
        return all(one["health"] == "up" for one in targets if one["labels"]["job"] != "router")  # kvhma.proxy has none
    except OSError:
        return False


def firing(api: str) -> set[str]:
    return {one["labels"]["alertname"] for one in get(api + "alerts")["alerts"] if one["state"] == "firing"}
