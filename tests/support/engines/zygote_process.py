# SPDX-License-Identifier: Apache-2.0
"""The zygote itself: imports what engines import, then forks on request. `zygote.Zygote` starts and owns it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn

ON_DEVICE = "KVHMA_E2E_ON_DEVICE"
"""In the environment of a zygote: each engine imports vLLM itself. Some modules of models open the device when they are
imported, and no fork can use a device that its parent has opened."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# What an engine imports in one process or another. Models are added by `_import_models`.
MODULES = [
    "torch",
    "transformers",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader.default_loader",
    "kvhma.vllm.connector",
]
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen3NextForCausalLM": "qwen3_next",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "MiMoForCausalLM": "mimo",
    "MiMoMTPModel": "mimo_mtp:MiMoMTP",
    "EagleLlamaForCausalLM": "llama_eagle",
    "LlavaForConditionalGeneration": "llava",
}


_children: set[int] = set()  # process groups of the zygote


def die_with_parent() -> None:
    """SIGKILL for this process as soon as the one that forked it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap(*_: object) -> None:
    # Orphans of killed engines become children of this process too (subreaper): a group has ended only when all its
    # members are reaped.
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _kill_all() -> None:
    for group in _children:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _child(server: Connection, handle: int, message: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        server.close()
        log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        os.environ.update(message["env"])
        time.tzset()  # the C library read TZ before the fork
        if (namespace := message["env"].get("KVHMA_E2E_NETNS")) is not None:
            _enter(namespace)
        # Descendants must not hold the connection open: its end of file shows that this process has ended.
        os.register_at_fork(after_in_child=lambda: _close(handle))
        module, function = message["target"].split(":")
        getattr(importlib.import_module(module), function)(Connection(handle), **message["kwargs"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _enter(namespace: str) -> None:
    """Move this process, which has one thread, to a network namespace of `ip netns`."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    steps = (
        libc.setns(handle, 0x40000000),  # CLONE_NEWNET
        # UCX looks for devices in /sys, which shows the devices of the namespace in which it was mounted.
        libc.unshare(0x00020000),  # CLONE_NEWNS
        libc.mount(b"none", b"/", None, 0x84000, None),  # MS_REC | MS_SLAVE
        libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
    )
    if any(steps):
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}: {steps}")
    os.close(handle)


def _close(handle: int) -> None:
    try:
        os.close(handle)
    except OSError:
        return


def _import_models() -> None:
    # vLLM inspects a class that it knows by name in an interpreter started for that, which takes eight seconds. It
    # inspects a class that is registered as a class in this process.
    from vllm.model_executor.models import ModelRegistry

    from support.engines import without_torchvision

    without_torchvision.install()
    for architecture, where in ARCHITECTURES.items():
        module, _, name = where.partition(":")
        loaded = importlib.import_module(f"vllm.model_executor.models.{module}")
        ModelRegistry.register_model(architecture, getattr(loaded, name or architecture))


def _spin_no_longer_than(seconds: float) -> None:
    # A worker that waits for its next step spins for a second before it blocks. With three engines that take turns on
    # two cores, two of them would occupy both.
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.SpinCondition = partial(shm_broadcast.SpinCondition, busy_loop_s=seconds)
    # A process that spins this briefly sometimes misses a notification, and by default polls again only after 5 s.
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 20


def _freeze() -> None:
    # An engine collects garbage when it has loaded its model, when it is ready, and when it ends. That took seconds in
    # each of its processes, because the collector traversed, and so copied, every import of the zygote.
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # which vLLM calls at the end


def _sleep_instead_of_yielding() -> None:
    # vLLM's processes wait for each other with sched_yield in a loop. With several engines on two cores, on Linux 6.18,
    # a process that only sleeps and wakes up did not run for up to ten seconds, and leases ended meanwhile. Nice -10
    # did not help, a real-time priority did.
    from vllm.distributed import utils

    utils.USE_SCHED_YIELD = False  # vLLM's own way for older Pythons: time.sleep(0)


def _import_engines() -> None:
    for module in MODULES:
        importlib.import_module(module)
    _import_models()
    _sleep_instead_of_yielding()
    if seconds := os.environ.get("KVHMA_E2E_SPIN_SECONDS"):
        _spin_no_longer_than(float(seconds))
    _freeze()


def serve(descriptor: int) -> None:
    """The zygote: fork on request until the other end closes."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if ON_DEVICE not in os.environ:
        _import_engines()
    os.register_at_fork(after_in_child=die_with_parent)
    threads = [entry.name for entry in Path("/proc/self/task").iterdir()]
    if len(threads) != 1:
        raise RuntimeError(f"importing vLLM started threads: {threads}")
    signal.signal(signal.SIGCHLD, _reap)
    server = Connection(descriptor)
    try:
        while True:
            message = server.recv()
            handle = recv_handle(server)
            pid = os.fork()
            if pid == 0:
                _child(server, handle, message)
            with contextlib.suppress(OSError):  # it may have ended already
                os.setpgid(pid, pid)  # both sides call it, because either may be first
            os.close(handle)
            _children.add(pid)
            server.send(pid)
    except (EOFError, OSError):
        _kill_all()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
