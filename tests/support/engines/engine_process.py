# SPDX-License-Identifier: Apache-2.0
"""The engine's end: vLLM's AsyncLLM behind a pipe. Runs in a fork of the zygote."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import threading
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CONSTANTS = "KVHMA_E2E_CONSTANTS"
"""In the environment of an engine: constants of kvhma by their full names, and other values for them, as JSON."""

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,  # no compilation, and with a fixed cache size no warm-up either
    "max_model_len": 2560,
    "max_num_seqs": 64,
    "block_size": 32,  # many blocks for short prompts; vLLM makes larger ones where a model needs them
    "enable_prefix_caching": False,
    "disable_hybrid_kv_cache_manager": False,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
    "worker_extension_cls": "support.engines.worker.Extension",
}


def main(
    connection: Connection, engine_args: dict[str, Any], begun: float, http: tuple[str, int] | None = None
) -> None:
    """Serve one engine until a stop request or until the test has ended."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from support.engines import engine_core

    stages = {"forked": time.time() - begun}
    _set_constants(json.loads(os.environ.get(CONSTANTS, "{}")))
    engine_core.install()
    _import_model(Path(engine_args["model"]))
    config = AsyncEngineArgs(**DEFAULTS | _typed(engine_args)).create_engine_config()
    if engine_args.get("async_scheduling"):
        config.scheduler_config.async_scheduling = True  # vLLM's CPU platform always switches it off
    # vLLM's CPU platform asks for spawn, which imports everything once more in each process. Only OpenMP's threads need
    # spawn, and this process has no OpenMP threads.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    stages["configured"] = time.time() - begun
    asyncio.run(_serve(connection, config, stages, begun, http))


def _set_constants(values: dict[str, Any]) -> None:
    for name, value in values.items():
        module, _, constant = name.rpartition(".")
        owner = importlib.import_module(module)
        getattr(owner, constant)  # fails if it was renamed
        setattr(owner, constant, value)


def _import_model(folder: Path) -> None:
    # vLLM inspects a class that it knows by name in an interpreter started for that, which takes eight seconds. It
    # inspects a class that is registered as a class, as the zygote's are, in this process.
    from vllm.model_executor.models import ModelRegistry

    for architecture in json.loads((folder / "config.json").read_text())["architectures"]:
        known = ModelRegistry.models[architecture]
        if hasattr(known, "module_name"):
            ModelRegistry.register_model(architecture, known.load_model_cls())


def _typed(engine_args: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import KVTransferConfig, StructuredOutputsConfig

    kinds = {"kv_transfer_config": KVTransferConfig, "structured_outputs_config": StructuredOutputsConfig}
    given = {name: engine_args[name] for name in kinds if engine_args.get(name) is not None}
    return engine_args | {name: kinds[name](**settings) for name, settings in given.items()}


_adapters: dict[tuple[str, str], int] = {}  # numbers of adapters, by name and folder: an engine counts its own


async def _serve(
    connection: Connection, config: Any, stages: dict[str, float], begun: float, http: tuple[str, int] | None
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_vllm_config(config)
    if http is not None:
        served = asyncio.create_task(_serve_http(engine, config.model_config.model, http))
    stages["ready"] = time.time() - begun
    connection.send((-1, stages, None))
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, connection.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(inbox.put_nowait, None)

    threading.Thread(target=read, name="pipe", daemon=True).start()
    tasks = set()
    while (message := await inbox.get()) is not None and message["op"] != "stop":
        task = asyncio.create_task(_answer(engine, connection, message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    nudge = asyncio.create_task(_nudge(engine))
    await asyncio.to_thread(engine.shutdown, timeout=10)
    nudge.cancel()
    if http is not None:
        served.cancel()


async def _serve_http(engine: Any, model: str, address: tuple[str, int]) -> None:
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = ["--model", model, "--served-model-name", "tiny", "--disable-uvicorn-access-log"]
    given += ["--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    await build_and_serve(engine, f"{address[0]}:{address[1]}", socket.create_server(address), arguments)


async def _nudge(engine: Any) -> None:
    # The engine core ends on SIGTERM. If the signal comes just before its main thread waits for an empty queue, Python
    # runs the handler only when an item arrives there. One stop in fifteen then took the whole timeout.
    await asyncio.sleep(0.3)
    await engine.engine_core.call_utility_async("get_supported_tasks")


async def _answer(engine: Any, connection: Connection, message: dict[str, Any]) -> None:
    operation = {"generate": _generate, "abort": _abort, "rpc": _rpc, "core": _core, "metrics": _metrics}
    number, op = message.pop("number"), message.pop("op")
    try:
        result, error = await operation[op](engine, **message), None
    except Exception as raised:
        result, error = None, f"{type(raised).__name__}: {raised}"
    connection.send((number, result, error))


async def _generate(engine: Any, sampling: dict[str, Any], timeout: float | None, **asked: Any) -> dict[str, Any]:
    begun = time.perf_counter()
    samples: list[dict[str, Any]] = []
    for _ in range(sampling.get("n", 1)):
        answer: dict[str, Any] = {"token_ids": [], "logprobs": [], "margins": [], "first_seconds": None}
        samples.append(answer | dict.fromkeys(("finish_reason", "error", "kv_transfer_params", "num_cached_tokens")))

    async def collect() -> None:
        async for output in engine.generate(sampling_params=_sampling_params(sampling), **_request(**asked)):
            for completion in output.outputs:
                _take(samples[completion.index], completion, time.perf_counter() - begun)
            # Only one of the deltas carries it.
            first = samples[0]
            first["num_cached_tokens"] = max(first["num_cached_tokens"] or 0, output.num_cached_tokens or 0)
            first["kv_transfer_params"] = output.kv_transfer_params or first["kv_transfer_params"]

    error = None
    try:
        await asyncio.wait_for(collect(), timeout)
    except asyncio.TimeoutError:
        error = f"TimeoutError: no end after {timeout} s"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    ended = {"error": error, "seconds": time.perf_counter() - begun, "begun": begun}
    first, *others = [sample | ended for sample in samples]
    return first | {"others": others}


def _sampling_params(sampling: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    if (shape := sampling.get("structured_outputs")) is not None:
        sampling = sampling | {"structured_outputs": StructuredOutputsParams(**shape)}
    return SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling)


def _request(
    prompt: list[int],
    request_id: str | None,
    adapter: tuple[str, str] | None,
    pictures: tuple[int, ...],
    rank: int | None,
) -> dict[str, Any]:
    """Return vLLM's form of these arguments."""
    from vllm.lora.request import LoRARequest

    lora = None
    if adapter is not None:
        lora = LoRARequest(adapter[0], _adapters.setdefault(adapter, len(_adapters) + 1), adapter[1])
    inputs: dict[str, Any] = {"prompt_token_ids": prompt}
    if pictures:
        inputs["multi_modal_data"] = {"image": [(_noise if seed > 0 else _embeddings)(seed) for seed in pictures]}
    return {
        "prompt": inputs,
        "request_id": request_id or uuid.uuid4().hex,
        "lora_request": lora,
        "data_parallel_rank": rank,
    }


def _noise(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8))


def _embeddings(seed: int) -> Any:
    """Embeddings that stand for a picture, as a router sends them to a decode engine, in as many tokens."""
    import torch

    return torch.randn(16, 128, generator=torch.Generator().manual_seed(-seed))


def _take(answer: dict[str, Any], completion: Any, seconds: float) -> None:
    if completion.token_ids and answer["first_seconds"] is None:
        answer["first_seconds"] = seconds
    answer["token_ids"] += completion.token_ids
    for token, candidates in zip(completion.token_ids, completion.logprobs or (), strict=False):
        chosen = candidates[token].logprob
        others = [c.logprob for t, c in candidates.items() if t != token]
        answer["logprobs"].append(chosen)
        answer["margins"].append(chosen - max(others, default=float("-inf")))
    answer["finish_reason"] = completion.finish_reason or answer["finish_reason"]


async def _abort(engine: Any, request_id: str) -> None:
    await engine.abort(request_id)


async def _rpc(engine: Any, method: str, arguments: tuple[Any, ...]) -> list[Any]:
    return list(await engine.collective_rpc(method, args=arguments))


async def _core(engine: Any, method: str, arguments: tuple[Any, ...]) -> list[Any]:
    core = engine.engine_core
    return [await core._call_utility_async(method, *arguments, engine=rank) for rank in core.core_engines]


async def _metrics(engine: Any) -> str:
    from prometheus_client import REGISTRY, generate_latest

    return generate_latest(REGISTRY).decode()
