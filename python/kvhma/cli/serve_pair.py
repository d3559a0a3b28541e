# SPDX-License-Identifier: Apache-2.0
"""``kvhma serve-pair``: runs a prefill engine, a decode engine and the proxy together on this host."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from kvhma.cli.doctor import installed
from kvhma.cli.processes import Part, run
from kvhma.versions import install_command

_MODULES = {
    "router": {"vllm": "vllm", "vllm_router": "router"},
    "proxy": {"vllm": "vllm", "aiohttp": "proxy"},
}
"""By front the required modules, and the extras that install them."""

_CHECKS = "--health-check-interval-secs 2 --health-failure-threshold 1 --worker-startup-check-interval 1"
"""Otherwise vllm-router notices in 30 s that an engine has started, and in 3 minutes that it is gone."""

_MEMORY = 0.8
"""Share of the host's memory that all ranks on CPUs claim together. By default vLLM claims 0.92 for each."""


@click.command("serve-pair", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Where clients ask.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address that clients reach.")
@click.option("--prefill-devices", metavar="LIST", help="CUDA_VISIBLE_DEVICES of the prefill engine, for example 0.")
@click.option("--decode-devices", metavar="LIST", help="The same of the decode engine, for example 1,2.")
@click.option("--prefill-tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--decode-tp", type=click.IntRange(1), default=1, show_default=True, help="Those of the decode engine.")
@click.option(
    "--front",
    type=click.Choice([*_MODULES]),
    help="What clients ask: vllm-router, which is the default if it is installed, or kvhma.proxy.",
)
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Folder for the logs of the three.")
def serve_pair(
    model: str, options: tuple[str, ...], port: int, host: str, logs: Path | None, **of_engines: str | int | None
) -> int:
    """Serve MODEL with a prefill and a decode engine on this host.

    OPTIONS are those of `vllm serve`, for both engines: --max-model-len 4096, for example. All three processes end
    with this one: Ctrl-C stops them, a second Ctrl-C kills them. The exit code is 1 if one had to be killed, 2 if one
    has ended by itself. The engines have a new secret in common, unless KVHMA_SECRET has one. For engines on several
    hosts see docs/start.md.
    """
    front = str(of_engines["front"] or ("router" if importlib.util.find_spec("vllm_router") else "proxy"))
    for module, extra in _MODULES[front].items():
        if importlib.util.find_spec(module) is None:
            raise click.UsageError(f"{module} is not installed: {install_command(extra)}")
    folder = logs or Path(tempfile.mkdtemp(prefix="kvhma-"))
    folder.mkdir(parents=True, exist_ok=True)
    prefill, decode, prefill_side, decode_side, of_router = free_ports(5)
    environment = with_secret(os.environ)
    engines = [
        _engine("prefill", model, options, prefill, prefill_side, folder, of_engines, environment),
        _engine("decode", model, options, decode, decode_side, folder, of_engines, environment),
    ]
    urls = [f"http://127.0.0.1:{number}" for number in (prefill, decode)]
    asked = [*_front(front, of_router), "--host", host, "--port", str(port), "--prefill", urls[0], "--decode", urls[1]]
    click.echo(f"starting a prefill and a decode engine; logs are in {folder}", err=True)
    if front == "proxy" and not of_engines["front"]:
        click.echo(f"clients ask kvhma.proxy; for vllm-router: {install_command('router')}", err=True)
    parts = [*engines, Part(front, asked, os.environ, folder / f"{front}.log", f"{host}:{port}")]
    config = folder.absolute() / "kvhma-prometheus.yml"
    metrics = {"prefill": prefill, "decode": decode} | ({"router": of_router} if front == "router" else {})
    config.write_text(_scrapes(metrics))
    config.chmod(0o644)  # a container's Prometheus is another user
    return run(parts, _ready(model, f"http://{host}:{port}", urls[1], config))


def _front(name: str, metrics: int) -> list[str]:
    """Return the command of what clients ask, without its addresses."""
    if name == "proxy":
        return [sys.executable, "-m", "kvhma.proxy"]
    router = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--policy", "round_robin"]
    return [*router, "--prometheus-port", str(metrics), *_CHECKS.split()]


def _scrapes(ports: Mapping[str, int]) -> str:
    """Return the configuration of a Prometheus that scrapes the processes at these ports; JSON is YAML too."""
    jobs = [{"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in ports.items()]
    return json.dumps({"global": {"scrape_interval": "5s"}, "scrape_configs": jobs}, indent=2) + "\n"


def _engine(
    name: str,
    model: str,
    options: Sequence[str],
    port: int,
    side_port: int,
    folder: Path,
    of_engines: Mapping[str, str | int | None],
    environment: Mapping[str, str],
) -> Part:
    transfer: dict[str, object] = {
        "kv_connector": "KvhmaConnector",
        "kv_connector_module_path": "kvhma.vllm",
        "kv_role": "kv_producer" if name == "prefill" else "kv_consumer",
        "kv_connector_extra_config": {"side_channel_host": "localhost", "side_channel_port": side_port},
    }
    command = [sys.executable, "-m", *_server(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--tensor-parallel-size", str(of_engines[f"{name}_tp"])]
    if name == "decode":
        transfer["kv_load_failure_policy"] = "recompute"
    command.append("--enable-prompt-tokens-details")  # vllm-router tells clients what P had cached
    command += ["--kv-transfer-config", json.dumps(transfer)]
    own = dict(environment)
    if not installed("vllm"):  # its build for CPUs
        own.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores_of(name, of_engines))
        command += ["--gpu-memory-utilization", f"{_MEMORY / sum(_sizes(of_engines).values()):.2f}"]
    command += options
    if devices := of_engines[f"{name}_devices"]:
        own["CUDA_VISIBLE_DEVICES"] = str(devices)
    return Part(name, command, own, folder / f"{name}.log", f"127.0.0.1:{port}")


def with_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with a secret for both engines, so that no other process of the host reads from them."""
    return {**environment, "KVHMA_SECRET": environment.get("KVHMA_SECRET") or secrets.token_hex(32)}


def _sizes(of_engines: Mapping[str, str | int | None]) -> dict[str, int]:
    return {role: int(of_engines[f"{role}_tp"] or 1) for role in ("prefill", "decode")}


def _cores_of(name: str, of_engines: Mapping[str, str | int | None]) -> str:
    """Return the cores of each rank of an engine on CPUs, in the form of vLLM's setting.

    By default each engine binds its threads to all cores, where they spin against those of the other engine.
    """
    sizes = _sizes(of_engines)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cores) // sum(sizes.values())
    first = 0 if name == "prefill" else sizes["prefill"]
    ranks = [cores[rank * share : (rank + 1) * share] for rank in range(first, first + sizes[name])]
    return "|".join(",".join(map(str, rank)) for rank in ranks) if share else "nobind"


def _server(model: str) -> Sequence[str]:
    """Return vLLM's module that serves a model, with its arguments.

    The command ``vllm`` looks up the version of the package ``vllm``, so it exits if the package is ``vllm-cpu``.
    """
    if installed("vllm"):
        return "vllm.entrypoints.cli.main", "serve", model
    return "vllm.entrypoints.launchers.api_server.entry", "--model", model


def _ready(model: str, url: str, decode: str, config: Path) -> str:
    body = json.dumps({"model": model, "prompt": "The quick brown fox jumps", "max_tokens": 16})
    return (
        f"ready: {url}/v1\n"
        f"  ask:  curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  see that the cache moved: curl -s {decode}/metrics | grep '^vllm:kvhma_load_seconds_count'\n"
        f"  for Prometheus: {config}\n"
        "Ctrl-C stops all three."
    )


def free_ports(count: int) -> list[int]:
    """Return different ports on which no process listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]
