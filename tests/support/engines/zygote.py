# SPDX-License-Identifier: Apache-2.0
"""One process that has imported torch and vLLM, and forks itself for every engine.

Importing vLLM takes about eight seconds of a core, and an engine is at least three processes. A process forked from
the zygote has the modules already and starts in milliseconds. The fork is safe because the zygote has one thread (one
OpenMP and one BLAS thread, no computation before the fork) and opens no device, no NIXL and no connection.

`Zygote` is the half that the test holds; `zygote_process` is the process.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[3]

ENVIRONMENT = {
    "PYTHONPATH": f"{REPO / 'python'}:{REPO / 'tests'}",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "NIXL_LOG_LEVEL": "WARN",
    # Tiny models gain nothing from a second thread, and several engines share two cores. Without a thread pool every
    # fork is safe and every sum has one order.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Even an eager engine compiles a function of its sampler, which takes seconds of the first request.
    "TORCHDYNAMO_DISABLE": "1",
    # Freed memory is returned at once, so that tests can compare resident memory over time.
    "MALLOC_ARENA_MAX": "2",
}


def engine_python() -> str:
    """The interpreter that has vLLM: this one, `KVHMA_E2E_PYTHON`, or that of `.venv-e2e`."""
    if named := os.environ.get("KVHMA_E2E_PYTHON"):
        return named
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    return str(REPO / ".venv-e2e" / "bin" / "python")


def vllm_version() -> str:
    """The version of vLLM that engines run, from whichever package has it."""
    ask = "from importlib.metadata import packages_distributions as of, version; print(version(of()['vllm'][0]))"
    return subprocess.run([engine_python(), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()


class Zygote:
    """Starts `module:function` in a fresh fork; ends with everything it started when closed or when the test dies.

    Args:
        log: file for what the zygote itself prints.
        env: added to the environment of all forks. Variables that are read while modules are loaded belong here.
        python: interpreter that has vLLM, `engine_python` unless given.
    """

    def __init__(self, log: Path, env: dict[str, str] | None = None, python: str | None = None) -> None:
        ours, theirs = socket.socketpair()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTEST_"))}
        with log.open("ab") as out, theirs:
            self._process = subprocess.Popen(
                [python or engine_python(), "-m", "support.engines.zygote_process", str(theirs.fileno())],
                env=inherited | ENVIRONMENT | (env or {}),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # The zygote stays in its caller's session: Linux may schedule each session as a whole. Workers that
                # only yield while they wait then block other sessions for minutes (seen with 6.18, two cores).
                preexec_fn=os.setpgrp,
            )
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        self.log = log

    def fork(
        self, target: str, *, log: Path, env: dict[str, str] | None = None, **kwargs: Any
    ) -> tuple[int, Connection]:
        """Run `target(connection, **kwargs)` in a new process group.

        Returns:
            The process id, which is also the id of its group, and our end of its connection.

        Raises:
            RuntimeError: the zygote has died.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                self._connection.send({"target": target, "log": str(log), "env": env or {}, "kwargs": kwargs})
                send_handle(self._connection, theirs.fileno(), self._process.pid)
                pid = self._connection.recv()
            except (EOFError, OSError) as error:
                ours.close()
                raise RuntimeError(f"the zygote died, see {self.log}") from error
        return pid, Connection(ours.detach())

    def close(self) -> None:
        self._connection.close()  # the zygote sees the end of file, kills its processes and exits
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
