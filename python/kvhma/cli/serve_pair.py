# SPDX-License-Identifier: Apache-2.0
"""``kvhma serve-pair``: runs a prefill engine, a decode engine and the proxy together on this host."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click

from kvhma.cli.doctor import installed
from kvhma.cli.format import printable

_STOP_SECONDS = 20
"""Seconds that a process has to exit after a signal."""

_LOG_LINES = 8
"""Lines shown from the log of a process that exited too early."""

_MODULES = {"vllm": "kvhma[vllm]", "aiohttp": "kvhma[proxy]", "prometheus_client": "kvhma[proxy]"}
"""Required modules, and the extras that install them."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the three processes.

    Attributes:
        name: ``prefill``, ``decode`` or ``proxy``.
        command: its arguments.
        environment: its environment variables.
        log: where its output goes.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


@click.command("serve-pair", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Where clients ask.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address that clients reach.")
@click.option("--prefill-devices", metavar="LIST", help="CUDA_VISIBLE_DEVICES of the prefill engine, for example 0.")
@click.option("--decode-devices", metavar="LIST", help="The same of the decode engine, for example 1,2.")
@click.option("--prefill-tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--decode-tp", type=click.IntRange(1), default=1, show_default=True, help="Those of the decode engine.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Folder for the logs of the three.")
def serve_pair(
    model: str, options: tuple[str, ...], port: int, host: str, logs: Path | None, **of_engines: str | int | None
) -> None:
    """Serve MODEL with a prefill and a decode engine on this host.

    OPTIONS are those of `vllm serve`, for both engines: --max-model-len 4096, for example. All three processes end
    with this one (Ctrl-C). The engines have a new secret in common, unless KVHMA_SECRET has one. For engines on several
    hosts see docs/start.md.
    """
    for module, extra in _MODULES.items():
        if importlib.util.find_spec(module) is None:
            raise click.UsageError(f"{module} is not installed: pip install '{extra}'")
    folder = logs or Path(tempfile.mkdtemp(prefix="kvhma-"))
    folder.mkdir(parents=True, exist_ok=True)
    prefill, decode, prefill_side, decode_side = free_ports(4)
    environment = with_secret(os.environ)
    engines = [
        _engine("prefill", model, options, prefill, prefill_side, folder, of_engines, environment),
        _engine("decode", model, options, decode, decode_side, folder, of_engines, environment),
    ]
    urls = [f"http://127.0.0.1:{number}" for number in (prefill, decode)]
    asked = [sys.executable, "-m", "kvhma.proxy", "--host", host, "--port", str(port)]
    proxy = Part("proxy", [*asked, "--prefill", urls[0], "--decode", urls[1]], os.environ, folder / "proxy.log")
    click.echo(f"starting a prefill and a decode engine; logs are in {folder}", err=True)
    with _signals_raise(), running([*engines, proxy]) as processes:
        _until_healthy(f"http://{host}:{port}/health", processes)
        click.echo(_ready(model, f"http://{host}:{port}", urls[1]))
        while True:
            _check(processes)
            time.sleep(0.5)


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
        command.append("--enable-prompt-tokens-details")
    command += ["--kv-transfer-config", json.dumps(transfer), *options]
    own = dict(environment)
    if not installed("vllm"):
        own.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores_of(name, of_engines))
    if devices := of_engines[f"{name}_devices"]:
        own["CUDA_VISIBLE_DEVICES"] = str(devices)
    return Part(name, command, own, folder / f"{name}.log")


def with_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with a secret for both engines, so that no other process of the host reads from them."""
    return {**environment, "KVHMA_SECRET": environment.get("KVHMA_SECRET") or secrets.token_hex(32)}


def _cores_of(name: str, of_engines: Mapping[str, str | int | None]) -> str:
    """Return the cores of each rank of an engine on CPUs, in the form of vLLM's setting.

    By default each engine binds its threads to all cores, where they spin against those of the other engine.
    """
    sizes = {role: int(of_engines[f"{role}_tp"] or 1) for role in ("prefill", "decode")}
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


def _ready(model: str, url: str, decode: str) -> str:
    body = json.dumps({"model": model, "prompt": "The quick brown fox jumps", "max_tokens": 16})
    return (
        f"ready: {url}/v1\n"
        f"  ask:  curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  see that the cache moved: curl -s {decode}/metrics | grep '^vllm:kvhma_load_seconds_count'\n"
        "Ctrl-C stops all three."
    )


def free_ports(count: int) -> list[int]:
    """Return different ports on which no process listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]


@contextlib.contextmanager
def running(parts: Sequence[Part]) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """Run processes by name, each with its children in a separate process group, and end all of them on exit.

    All groups are in one session. Linux may schedule each session as a whole, and an idle worker of vLLM only yields.
    With few cores it then keeps the other engine from running for minutes (seen with Linux 6.18 on two cores).
    """
    processes: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    try:
        for part in parts:
            with part.log.open("wb") as log:
                process = subprocess.Popen(  # noqa: S603
                    part.command,
                    env=part.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=os.setpgrp,
                )
            processes[part.name] = process, part.log
        yield processes
    finally:
        _stop([process for process, _ in processes.values()])


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    end = time.monotonic() + _STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        # Workers that outlive their engine are still in its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _check(processes: Mapping[str, tuple[subprocess.Popen[bytes], Path]]) -> None:
    for name, (process, log) in processes.items():
        if (code := process.poll()) is not None:
            lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            click.echo("\n".join(printable(line) for line in lines), err=True)
            raise click.ClickException(f"the {name} process has ended with code {code}; its log is {log}")


def _until_healthy(url: str, processes: Mapping[str, tuple[subprocess.Popen[bytes], Path]]) -> None:
    while True:
        _check(processes)
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
            if answer.status == 200:
                return
        time.sleep(0.5)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Treat SIGTERM, for example from a supervisor, like Ctrl-C: end the three processes."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
    finally:
        signal.signal(signal.SIGTERM, before)
