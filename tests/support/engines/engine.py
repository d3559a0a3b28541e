# SPDX-License-Identifier: Apache-2.0
"""The test's end of an engine: starts it, sends requests, inspects it, stops it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.engines.zygote import Zygote
from support.waiting import HANG_SECONDS

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class EngineFailed(Exception):
    """The engine ended, did not start, or refused a call."""


@dataclass(frozen=True)
class Answer:
    """The result of one request.

    Attributes:
        token_ids: generated tokens.
        logprobs: log-probability of each generated token.
        margins: by how much each generated token led the runner-up (nats).
        finish_reason: "length", "stop", "abort", "error", or None if the request ended in `error`.
        error: type and text of the exception that the front end raised, if one did.
        kv_transfer_params: what the connector returned.
        num_cached_tokens: as vLLM reports it. After a hand-off that is the number of tokens that P had cached, not the
        number that D loaded (`Engine.loaded_tokens`).
        first_seconds: time to the first token, None if there was no token.
        seconds: time to the end.
        others: the other samples of the prompt, if more than one was asked for.
        begun: when the front end began, by `time.perf_counter`, whose clock all processes of a machine share.
    """

    token_ids: list[int]
    logprobs: list[float]
    margins: list[float]
    finish_reason: str | None
    error: str | None
    kv_transfer_params: dict[str, Any] | None
    num_cached_tokens: int | None
    first_seconds: float | None
    seconds: float
    others: tuple[Answer, ...] = ()
    begun: float = 0.0


_given: set[int] = set()
_PROCESSES = (("", "gw0"), ("_COUNT", "1"))
"""The number of this process of pytest, and how many there are: the ends of their variables, and without them."""


def free_port() -> int:
    """A TCP port that is free now, that the kernel does not assign by itself, and that is never returned twice.

    Each of pytest's processes draws from separate ports: an engine binds its port only some time after this.
    """
    first, step = (int(os.environ.get(f"PYTEST_XDIST_WORKER{name}", at).lstrip("gw")) for name, at in _PROCESSES)
    while True:
        with contextlib.suppress(OSError), socket.socket() as listener:
            port = random.SystemRandom().randrange(15_000 + first, 32_000, step)
            listener.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def make_models(zygote: Zygote, folder: Path, *names: str) -> list[Path]:
    """Directories of tiny models (`tiny.MODELS`) under `folder`, made unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    _, connection = zygote.fork("support.engines.tiny:make", log=folder / "make.log", names=names, folder=str(folder))
    with connection:
        try:
            return [Path(made) for made in connection.recv()]
        except EOFError:
            raise EngineFailed(f"models were not made: {_tail(folder / 'make.log')}") from None


@dataclass
class Engine:
    """One vLLM engine (front end, engine core, workers) in its own process group.

    Attributes:
        zygote: what it is forked from.
        model_dir: model to serve.
        log: file for everything its processes print.
        kv_transfer_config: as vLLM takes it; None for an engine without connector.
        env: added to its environment. `VLLM_NIXL_SIDE_CHANNEL_PORT` is a free port unless given.
        engine_args: any of vLLM's `AsyncEngineArgs` over the defaults of `engine_process`.
        http: host and port where vLLM's HTTP server serves it too, as the model `tiny`; it needs a tokenizer.
    """

    zygote: Zygote
    model_dir: Path
    log: Path
    kv_transfer_config: dict[str, Any] | None = None
    tensor_parallel_size: int = 1
    block_size: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    engine_args: dict[str, Any] = field(default_factory=dict)
    http: tuple[str, int] | None = None
    started: dict[str, float] = field(default_factory=dict, init=False)
    """Seconds after `start` at which each stage was over, once ready."""

    def start(self) -> Engine:
        """Start the engine without waiting; `ready` waits."""
        env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} | self.env
        arguments = {"tensor_parallel_size": self.tensor_parallel_size, "kv_transfer_config": self.kv_transfer_config}
        if self.block_size is not None:
            arguments["block_size"] = self.block_size
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._calls = itertools.count()
        self._waiting: dict[int, Future[Any]] = {-1: Future()}
        self._lock = threading.Lock()
        self._ready = self._waiting[-1]
        self.pid, self._connection = self.zygote.fork(
            "support.engines.engine_process:main",
            log=self.log,
            env=env,
            engine_args={"model": str(self.model_dir)} | arguments | self.engine_args,
            begun=time.time(),
            http=self.http,
        )
        self._reader = threading.Thread(target=self._read, name=f"engine {self.pid}", daemon=True)
        self._reader.start()
        return self

    def ready(self, timeout: float = 3 * HANG_SECONDS) -> Engine:
        """Wait until the engine accepts requests.

        Raises:
            EngineFailed: the engine ended instead; the message has the end of its log.
            TimeoutError: neither happened in time.
        """
        self.started = self._ready.result(timeout)
        return self

    @property
    def alive(self) -> bool:
        """Whether its front end runs."""
        return self._reader.is_alive()

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
        request_id: str | None = None,
        logprobs: int = 2,
        rank: int | None = None,
        timeout: float | None = 2 * HANG_SECONDS,
        adapter: tuple[str, Path] | None = None,
        pictures: Sequence[int] = (),
        **sampling: Any,
    ) -> Future[Answer]:
        """Request a completion, greedy and without end-of-sequence token unless `sampling` sets them.

        An `adapter` is its name and its folder, and `rank` the data-parallel rank that is to answer. `pictures` are
        seeds of pictures of noise; a negative seed gives embeddings instead of a picture. A request that takes longer
        than `timeout` seconds is aborted, and its answer has an `error`. Exceptions of the front end are in the answer;
        the future itself fails with `EngineFailed` when the engine ends.
        """
        return self._call(
            "generate",
            prompt=list(prompt_token_ids),
            request_id=request_id,
            rank=rank,
            timeout=timeout,
            adapter=None if adapter is None else (adapter[0], str(adapter[1])),
            pictures=tuple(pictures),
            sampling={
                "max_tokens": max_tokens,
                "logprobs": logprobs,
                "temperature": 0.0,
                "ignore_eos": True,
                "extra_args": None if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params},
            }
            | sampling,
        )

    def abort(self, request_id: str) -> None:
        """Abort the request that has this id; its answer ends with `finish_reason` "abort"."""
        self._call("abort", request_id=request_id).result(60)

    def rpc(self, method: str, *args: Any, timeout: float = 60) -> list[Any]:
        """Call a method of `worker.Extension` (or of vLLM's worker) on every worker; one result per rank."""
        return list(self._call("rpc", method=method, arguments=args).result(timeout))

    def core(self, method: str, *args: Any, timeout: float = 60) -> Any:
        """Call a method of the engine core: one of `engine_core.METHODS`, or one of vLLM's utilities."""
        return self.cores(method, *args, timeout=timeout)[0]

    def cores(self, method: str, *args: Any, timeout: float = 60) -> list[Any]:
        """Call a method of the engine core of every data-parallel rank."""
        return list(self._call("core", method=method, arguments=args).result(timeout))

    def state(self) -> dict[str, Any]:
        """The scheduler: waiting, running, held requests; free and all blocks of the pool."""
        return dict(self.core("e2e_state"))

    def metrics(self) -> str:
        """Prometheus text of the front end."""
        return str(self._call("metrics").result(60))

    def sample(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric, by its name in the text, with these labels; 0 if there is no such sample."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in self.metrics().splitlines()
            if line.partition("{")[0].partition(" ")[0] == name and all(label in line for label in wanted)
        )

    def loaded_tokens(self) -> int:
        """Prompt tokens that its requests so far got through the connector instead of computing them."""
        return int(self.sample("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))

    def idle(self, timeout: float = HANG_SECONDS, *, free: int | None = None) -> dict[str, Any]:
        """Wait until the scheduler holds no request (and `free` blocks are free), and return its state.

        Raises:
            TimeoutError: it still holds some.
        """
        end = time.monotonic() + timeout
        while True:
            state = self.state()
            if not state["requests"] and (free is None or state["free_blocks"] == free):
                return state
            if time.monotonic() > end:
                raise TimeoutError(f"after {timeout} s the scheduler still holds {state}")
            time.sleep(0.05)

    def pids(self) -> list[int]:
        """Ids of all processes of its group that run."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                # The name in parentheses may hold anything: count from the last one. Then: state, parent, group.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return sorted(found)

    def pause(self) -> None:
        """Stop all its processes until `go_on`: this simulates a peer that hangs, or one that uses no CPU."""
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def stacks(self) -> None:
        """Print the stacks of all threads of all its processes into the log."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def stop(self, timeout: float = 20) -> None:
        """Stop the engine as an operator would; kill what is left after `timeout` seconds."""
        if self.alive:
            with contextlib.suppress(EngineFailed, OSError):
                self._send({"op": "stop"})
            self._reader.join(timeout)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the whole group; return when no process and no shared memory of the group is left."""
        shared = shared_memory(self.pids())
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            left = self.pids()
            if not left:
                break
            if time.monotonic() > end:
                raise EngineFailed(f"processes outlive SIGKILL: {[_describe(pid) for pid in left]}")
            time.sleep(0.02)
        for path in shared:
            path.unlink(missing_ok=True)
        self._reader.join(10)
        self._connection.close()

    def __enter__(self) -> Engine:
        return self.start().ready()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _call(self, op: str, **message: Any) -> Future[Any]:
        number = next(self._calls)
        future: Future[Any] = Future()
        with self._lock:
            self._waiting[number] = future
        try:
            self._send({"op": op, "number": number} | message)
        except OSError:
            self._fail_all()
        return future

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._connection.send(message)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, result, error = self._connection.recv()
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is None:  # cancelled because a message could not be sent
                    continue
                if error is not None:
                    future.set_exception(EngineFailed(error))
                elif isinstance(result, dict) and "token_ids" in result:
                    others = tuple(Answer(**other) for other in result.pop("others"))
                    future.set_result(Answer(**result, others=others))
                else:
                    future.set_result(result)
        self._fail_all()

    def _fail_all(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(EngineFailed(f"engine {self.pid} ended, see {self.log}:\n{_tail(self.log)}"))


@contextlib.contextmanager
def engines(
    zygote: Zygote, model_dir: Path, logs: Path, *, timeout: float = 3 * HANG_SECONDS, **settings: dict[str, Any]
) -> Iterator[tuple[Engine, ...]]:
    """Engines started at the same time, in the order of the keywords; a keyword is also the name of the log.

        with engines(zygote, model, logs, prefill={"kv_transfer_config": c}, decode={"block_size": 64}) as (p, d):

    Keys of a setting are those of `Engine`; others are engine arguments of vLLM.
    """
    known = {"kv_transfer_config", "tensor_parallel_size", "block_size", "env"}
    made = [
        Engine(
            zygote,
            model_dir,
            logs / f"{name}.log",
            **{key: value for key, value in given.items() if key in known},
            engine_args={key: value for key, value in given.items() if key not in known},
        )
        for name, given in settings.items()
    ]
    with contextlib.ExitStack() as stack:
        for engine in made:
            engine.start()
            stack.callback(engine.kill)
        for engine in made:
            engine.ready(timeout)
        yield tuple(made)
        # Only after a test that passed: a failed test may leave work that delays the end of an engine.
        with ThreadPoolExecutor() as pool:
            list(pool.map(Engine.stop, made))


def shared_memory(pids: list[int]) -> set[Path]:
    """Files of shared memory of Python and vLLM that processes have mapped; killed processes do not remove them."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(path) for path in re.findall(r"(/dev/shm/(?:psm|vllm_dist)_\S+)$", maps, re.MULTILINE)}
    return found


def _describe(pid: int) -> str:
    found = []
    for name in ("cmdline", "wchan", "stat"):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/{name}").read_text().replace("\0", " ")[:100])
    return f"{pid}: {found}"


def _tail(log: Path, lines: int = 30) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return "(no log)"
