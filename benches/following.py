# SPDX-License-Identifier: Apache-2.0
"""Prompts that D reads while P computes them, between two hosts with a cable of limited rate.

They are compared with computing first and reading afterwards, by kvhma and by vLLM's own connector. P really computes.
Then D gets a second question about a document over 1 Gb/s: with hits of each group, and with vLLM's rule.

Hosts are network namespaces of this machine (needs `ip` and `tc`, and the right to make them). Prints Markdown, which
is benches/RESULTS_FOLLOWING.md. Needs the engines of `make e2e`, and `tests` on the path.

    python benches/following.py [--models llama ...] [--rates 1gbit ...] [--rounds 3] [--pictures docs/assets]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from handoffs.alone import WIDE, alone
from handoffs.bars import draw
from support.engines import REMOTE_DECODE, Answer, Engine, Zygote, engines, make_models
from support.handoff import arguments, kvhma, prompts

MODELS = {"llama": "FA", "gemma3": "FA + SWA", "nemotron_h": "FA + Mamba2", "qwen3_next": "FA + GDN"}
RATES = {"100mbit": 100e6 / 8, "1gbit": 1e9 / 8, "10gbit": 10e9 / 8, "unlimited": float("inf")}
TOKENS = 4001
CHUNK = 512
DOCUMENT, QUESTION = 5000, 900
CACHED = 3600
"""Tokens of the prompt that P has cached, in the rows where it has."""

QUIET_SECONDS = 1.3
"""A worker of vLLM spins for a second after its last step."""

FOLLOWED, AT_ONCE, AFTER, THEIRS = "followed", "asked at once, read after", "one after the other", "NixlConnector"
FORMULA, AS_READ, OWN_HIT = "formula", "at one read's speed", "D's own hit"


@dataclass
class Host:
    """A network namespace and its end of the cable."""

    namespace: str
    address: str
    device: str = field(init=False)

    def __post_init__(self) -> None:
        """Name the device."""
        self.device = f"v{self.namespace}"[:15]

    @property
    def env(self) -> dict[str, str]:
        """What an engine on this host needs."""
        return {
            "KVHMA_E2E_NETNS": self.namespace,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.address,
            # On one machine UCX would find other paths than the cable.
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": self.device,
            "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        }


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def cable() -> Iterator[tuple[Host, Host]]:
    """Two hosts."""
    tag = f"kvf{os.getpid() % 100_000}"
    hosts = Host(f"{tag}p", "10.78.0.1"), Host(f"{tag}d", "10.78.0.2")
    with contextlib.ExitStack() as stack:
        for host in hosts:
            run("ip", "netns", "add", host.namespace)
            stack.callback(run, "ip", "netns", "del", host.namespace)
        run("ip", "link", "add", hosts[0].device, "type", "veth", "peer", "name", hosts[1].device)
        for host in hosts:
            run("ip", "link", "set", host.device, "netns", host.namespace)
            for command in (
                f"addr add {host.address}/24 dev {host.device}",
                f"link set {host.device} up",
                "link set lo up",
            ):
                run("ip", "-n", host.namespace, *command.split())
        yield hosts


def limit(hosts: Sequence[Host], rate: str) -> None:
    """Limit both ends of the cable."""
    for host in hosts:
        tc = ["ip", "netns", "exec", host.namespace, "tc", "qdisc"]
        subprocess.run([*tc, "del", "dev", host.device, "root"], check=False, capture_output=True)
        if rate != "unlimited":
            run(*tc, *f"add dev {host.device} root tbf rate {rate} burst 1mb latency 100ms".split())


@dataclass(frozen=True)
class Turn:
    """One prompt: seconds to D's first token, of them after P's end, and what D had left to read then.

    Attributes:
        first_token: from the first request to D's first token.
        after: from P's end to it.
        last_bytes: of D's last read.
        all_bytes: of all of its reads.
        descriptors: that were planned.
        reading: seconds of its last read.
        own_hit: seconds to the first token of the same prompt once D has it; 0 where D caches no prefixes.
    """

    first_token: float
    after: float
    last_bytes: float
    all_bytes: float
    descriptors: float
    reading: float
    own_hit: float


class Pair:
    """P and D with one connector."""

    def __init__(self, p: Engine, d: Engine, how: str) -> None:
        """Hand off one prompt, which connects them."""
        self.p, self.d, self.how = p, d, how
        self.address: dict[str, Any] = {}
        for prompt in prompts(("first", how), [301, 601]):
            told = self.compute(prompt).result(300).kv_transfer_params or {}
            self.address = {name: told.get(name) for name in ("remote_host", "remote_port")}
            sound(self.read(prompt, told).result(300))

    def compute(self, prompt: Sequence[int], **more: Any) -> Future[Answer]:
        return self.p.generate(prompt, max_tokens=1, timeout=300, kv_transfer_params=REMOTE_DECODE | more)

    def read(self, prompt: Sequence[int], params: dict[str, Any] | None) -> Future[Answer]:
        return self.d.generate(prompt, max_tokens=1, timeout=300, kv_transfer_params=params)

    def counted(self) -> tuple[float, float, float, float]:
        if self.how == THEIRS:
            return 0.0, 0.0, self.d.sample("vllm:nixl_num_descriptors_sum"), 0.0
        last = self.d.sample("vllm:kvhma_bytes_sum")
        return (
            last,
            last + self.d.sample("vllm:kvhma_piece_bytes_total"),
            self.d.sample("vllm:kvhma_rank_descriptors_total"),
            self.d.sample("vllm:kvhma_transfer_seconds_sum"),
        )

    def turn(self, prompt: Sequence[int], *, again: bool) -> Turn:
        """Hand off a prompt, and ask D `again`, which has it then."""
        before = self.counted()
        if self.how in (FOLLOWED, AT_ONCE):
            ticket = {"kvhma_ticket": secrets.token_hex(16)}
            at_p = self.compute(prompt, **ticket)
            at_d = self.read(prompt, {"do_remote_prefill": True, **ticket, **self.address})
            computed = sound(at_p.result(300))
        else:
            computed = sound(self.compute(prompt).result(300))
            at_d = self.read(prompt, computed.kv_transfer_params)
        answer = sound(at_d.result(300))
        first = answer.begun + (answer.first_seconds or 0.0)
        now = self.counted()
        own = sound(self.d.generate(prompt, max_tokens=1, timeout=300).result(300)).first_seconds if again else None
        last, all_bytes, descriptors, reading = (b - a for a, b in zip(before, now, strict=True))
        seconds = first - computed.begun
        return Turn(seconds, seconds - computed.seconds, last, all_bytes, descriptors, reading, own or 0.0)


def sound(answer: Answer) -> Answer:
    if answer.error is not None or answer.finish_reason != "length":
        raise RuntimeError(f"an answer ended with {answer.finish_reason}: {answer.error}")
    return answer


def measure(zygote: Zygote, folder: Path, hosts: tuple[Host, Host], name: str, options: argparse.Namespace) -> None:
    """Print the tables of a model, and draw the cold one."""
    rates, rounds, pictures = options.rates, options.rounds, options.pictures
    (model,) = make_models(zygote, folder / "models", name)
    same = {"max_num_batched_tokens": CHUNK, "kv_cache_memory_bytes": 2 << 30, "max_model_len": 4096, **WIDE}
    cached = name not in ("nemotron_h",)  # vLLM's CPU engines with Mamba2's states have no prefix cache for them
    keeps = name in ("llama", "gemma3")  # with states, hits are of whole checkpoints
    p, d = hosts
    theirs = {"kv_connector": THEIRS, "kv_role": "kv_both"}
    settings = {
        "p": kvhma(name, env=p.env, enable_prefix_caching=cached, **same),
        "d": kvhma(name, env=d.env, enable_prefix_caching=keeps, **same),
        "whole": kvhma(
            name, env=d.env, constants={"kvhma.vllm.options.tickets.following.PIECE_TOKENS": 1 << 30}, **same
        ),
        "their p": arguments(name, env=p.env, kv_transfer_config=theirs, enable_prefix_caching=cached, **same),
        "their d": arguments(name, env=d.env, kv_transfer_config=theirs, **same),
    }
    with engines(zygote, model, folder / name, **settings) as (prefill, decode, whole, *others):
        limit(hosts, "unlimited")
        pairs = {
            FOLLOWED: Pair(prefill, decode, FOLLOWED),
            AT_ONCE: Pair(prefill, whole, AT_ONCE),
            AFTER: Pair(prefill, decode, AFTER),
            THEIRS: Pair(others[0], others[1], THEIRS),
        }
        for what in ("cold", "cached at P") if cached else ("cold",):
            title = f"{name} ({MODELS[name]}), {TOKENS:,} tokens, {what}"
            print(f"\n### {title}\n")
            print(
                f"| rate | | {' | '.join(pairs)} | {FORMULA} | {AS_READ} | {OWN_HIT} |\n|---|---{'|---' * (len(pairs) + 3)}|"
            )
            drawn = {}
            for rate in rates:
                limit(hosts, rate)
                drawn[rate] = row(pairs, what, rate, rounds, keeps=keeps)
            if what == "cold" and pictures is not None:
                about = "Milliseconds from P's end to D's first token. Each rate has its own scale."
                (pictures / f"following-{name}.svg").write_text(draw(title, about, drawn), encoding="utf-8")


def row(pairs: dict[str, Pair], what: str, rate: str, rounds: int, *, keeps: bool) -> dict[str, float]:
    """Print the rows of a rate; return seconds after P's end, of each column and of the formula."""
    found: dict[str, list[Turn]] = {how: [] for how in pairs}
    for number in range(rounds):
        turn = number % len(pairs)
        for how in [*pairs][turn:] + [*pairs][:turn]:
            (prompt,) = prompts((what, rate, number, how), [TOKENS])
            running = (engine for pair in pairs.values() for engine in (pair.p, pair.d))
            with alone((pairs[how].p, pairs[how].d), running):
                if what != "cold":
                    pairs[how].p.generate(prompt[:CACHED], max_tokens=1, timeout=300).result(300)
                time.sleep(QUIET_SECONDS)
                found[how].append(pairs[how].turn(prompt, again=keeps and how == AFTER))
    medians = {
        how: Turn(*(statistics.median(values) for values in zip(*(vars(turn).values() for turn in turns), strict=True)))
        for how, turns in found.items()
    }
    ours, whole = medians[FOLLOWED], medians[AFTER]
    # What is left to read when P ends: the last piece, or what could not be carried before. At the cable's rate, and at
    # the speed of kvhma's one read of all of it, since two cores do not fill every cable.
    computing, measured = ours.first_token - ours.after, whole.last_bytes / (whole.reading or math.inf)
    wire, read = (
        max(ours.last_bytes / speed, ours.all_bytes / speed - computing)
        for speed in (RATES[rate], measured or math.inf)
    )
    for title, of in (("first token", "first_token"), ("after P's end", "after")):
        cells = [f"{getattr(medians[how], of) * 1e3:,.0f} ms" for how in pairs]
        floors = [f"{seconds * 1e3:,.0f} ms" if seconds else "" for seconds in (wire, read, whole.own_hit)]
        print(f"| {rate} | {title} | {' | '.join(cells)} | {' | '.join(floors if of == 'after' else ['', '', ''])} |")
    share = ours.last_bytes / ours.all_bytes if ours.all_bytes else 1.0
    print(
        f"| {rate} | read last, descriptors | {ours.last_bytes / 2**20:,.1f} of {ours.all_bytes / 2**20:,.1f} MiB "
        f"({share:.0%}), {ours.descriptors:,.0f} | "
        f"{' | '.join(f'{medians[how].descriptors:,.0f}' for how in [*pairs][1:])} | | "
        f"{measured / 1e6:,.0f} MB/s | |",
        flush=True,
    )
    return {how: turn.after for how, turn in medians.items()} | {FORMULA: wire}


HEAD = """\
# Results of reading while P computes

Made by `benches/following.py` (`make bench-following`): prompts of {tokens:,} tokens that P computes {chunk} at a time,
medians of {rounds} rounds, {machine}. P and D are network namespaces with a cable of limited rate. Engines of a tiny
model with caches of 32 MiB a layer share {cores} cores. P computes while D copies, so separate machines gain more than
this.

"Formula" is the time for what is left to read when P ends, at the cable's rate. This is the last piece, or all that the
cable could not carry while P computed. "{read}" is the same at the speed of kvhma's own read of all of it, alone: two
cores do not fill every cable. "{own}" is the first token of the same prompt when D has it: its front end, scheduler and
step. A request that is sent to D after P's end adds all of that to the formula; requests sent to both at once add only
D's step.
"""


def documents(zygote: Zygote, folder: Path, hosts: tuple[Host, Host], rounds: int) -> None:
    """Print the table of a second question about a document, in turns by each rule of D's hits."""
    (model,) = make_models(zygote, folder / "models", "gpt_oss")
    layers = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
    lengths = {"max_position_embeddings": 8192, "rope_parameters": yarn | {"beta_fast": 32.0, "beta_slow": 1.0}}
    wide: dict[str, Any] = WIDE | {"hf_overrides": WIDE["hf_overrides"] | layers | lengths}
    same = {"max_num_batched_tokens": CHUNK, "kv_cache_memory_bytes": 2 << 30, "max_model_len": 8192, **wide}

    def engine(host: Host, core: str, block: int) -> dict[str, Any]:
        env = host.env | {"VLLM_CPU_OMP_THREADS_BIND": core}
        return kvhma("gpt_oss", block_size=block, enable_prefix_caching=True, env=env, **same)

    settings = {"p": engine(hosts[0], "0", 32), "ours": engine(hosts[1], "1", 128), "vllm": engine(hosts[1], "1", 128)}
    found: list[list[Turn]] = [[], []]
    with engines(zygote, model, folder / "documents", **settings) as (p, *decodes):
        limit(hosts, "1gbit")
        decodes[1].core("e2e_hit_as_vllm")
        pairs = [Pair(p, d, AFTER) for d in decodes]
        for number in range(rounds):
            document, first, *seconds = prompts(number, [DOCUMENT, *[QUESTION] * 3])
            for index in (number % 2, 1 - number % 2):
                pairs[index].turn(document + first, again=False)
                with alone((p, pairs[index].d), (p, *decodes)):
                    time.sleep(QUIET_SECONDS)
                    found[index].append(pairs[index].turn(document + seconds[index], again=False))
    print(
        f"\n### A second question of {QUESTION:,} tokens about {DOCUMENT:,}, gpt_oss (FA + SWA), one core an engine\n"
    )
    print("| 1gbit | vLLM's rule | each group's hit | ratio |\n|---|---|---|---|")
    for title, of, unit in (
        ("first token, s", "first_token", 1),
        ("after P's end, s", "after", 1),
        ("MiB", "all_bytes", 2**20),
    ):
        ours, theirs = (statistics.median(getattr(turn, of) for turn in turns) / unit for turns in found)
        print(f"| {title} | {theirs:,.2f} | {ours:,.2f} | {theirs / ours:.1f} × |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Reading while P computes, over a cable of limited rate.")
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--rates", nargs="*", choices=[*RATES], default=[*RATES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pictures", type=Path, help="folder to draw into")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, kvhma {version('kvhma')}, nixl {version('nixl')}"
    print(
        HEAD.format(
            tokens=TOKENS, chunk=CHUNK, rounds=options.rounds, machine=machine, cores=cores, own=OWN_HIT, read=AS_READ
        )
    )
    with tempfile.TemporaryDirectory() as folder, cable() as hosts, Zygote(Path(folder) / "zygote.log") as zygote:
        for name in options.models:
            measure(zygote, Path(folder), hosts, name, options)
        documents(zygote, Path(folder), hosts, options.rounds)


if __name__ == "__main__":
    main()
