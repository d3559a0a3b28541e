# SPDX-License-Identifier: Apache-2.0
"""Families of models with special caches: hand-offs in both directions, and the requests after them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.engines import Answer, Engine, EngineFailed, Zygote, engines
from support.engines.compare import distance
from support.handoff import all_free, arguments, decode, kvhma, loads, noise, prefill, prompts, same
from support.tokenizer import IMAGE, with_tokenizer

pytestmark = pytest.mark.families
Models = Callable[[str], Path]
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


@dataclass(frozen=True)
class Row:
    """A family, and the differences between its two engines.

    Attributes:
        p, d: arguments of the engines.
        kernels: methods of the workers that replace kernels which fail in vLLM's build for CPUs.
        picture: whether a picture is in each prompt.
        hit: whether D's prefix cache has all whole blocks of a hand-off; P's has, when they change places.
        lacks: the error of an engine that vLLM's build for CPUs cannot run, a pattern.
    """

    p: Mapping[str, Any] = field(default_factory=dict)
    d: Mapping[str, Any] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    picture: bool = False
    hit: bool = True
    lacks: str | None = None


ROWS = {
    "jamba": Row(d=TWO_RANKS, kernels=("e2e_mamba_1",)),
    "llama4": Row(),
    "mimo_v2": Row(d=TWO_RANKS),
    "mimo_v2_wide_keys": Row(lacks=r"module 'triton' has no attribute '\w+'"),
    "gemma3n": Row(),
    "falcon_h1": Row(d=TWO_RANKS, kernels=("e2e_mamba_2",)),
    "zamba2": Row(d=TWO_RANKS, kernels=("e2e_mamba_2",)),
    "granitemoehybrid": Row(p=TWO_RANKS, kernels=("e2e_mamba_2",)),
    "qwen2_5_vl": Row(picture=True),
    "step3p5": Row(),
    # The window begins within a block of D's, and P no longer has its first tokens: such a block is never cached.
    "exaone4": Row(p={"block_size": 32}, d={"block_size": 96}, hit=False),
}
ADDED = 3
"""Tokens by which a prompt is longer than what is sent, if it has a picture."""


@pytest.mark.parametrize("name", ROWS)
def test_family(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    row = ROWS[name]
    more = {"enable_prefix_caching": True}
    folder = model(name)
    words: dict[str, Any] = {}
    if row.picture:
        folder = with_tokenizer(folder, tmp_path / "model")
        words = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    settings = {
        "p": kvhma(name, **more, **words, **row.p),
        "d": kvhma(name, **more, **words, **row.d),
        "plain": arguments(name, **words),
    }
    if row.lacks is not None:
        skip_what_vllm_cannot(row.lacks, zygote, folder, tmp_path, settings["plain"])
    with engines(zygote, folder, tmp_path, **settings) as (p, d, plain):
        for engine in (p, d, plain):
            for method in row.kernels:
                engine.rpc(method)
        for sender, reader in ((p, d), (d, p)):
            asked = _Asked(name, sender, reader, plain, 1 if row.picture else None)
            loaded = hand_over_and_go_on(asked, hit=row.hit or reader is p)
            assert loads(reader) == loaded * reader.tensor_parallel_size
        for engine in (p, d):
            assert engine.sample("vllm:kvhma_failed_loads_total") == 0
            all_free(engine)


def skip_what_vllm_cannot(lacks: str, zygote: Zygote, folder: Path, logs: Path, settings: dict[str, Any]) -> None:
    """Skip the test if an engine without connector fails, with its error; any other failure fails the test."""
    with contextlib.suppress(EngineFailed), engines(zygote, folder, logs, alone=settings) as (alone,):
        if alone.generate([1, 2, 3], max_tokens=1).result().error is None:
            return
    said = re.search(lacks, (logs / "alone.log").read_text())
    assert said is not None
    pytest.skip(f"vLLM's build for CPUs: {said.group()}")


def hand_over_and_go_on(asked: _Asked, *, hit: bool) -> int:
    """Hand off prompts, and send prompts that share blocks with them to D alone. Returns the number of hand-offs.

    D's prefix cache has all whole blocks of a hand-off, or with `hit` false no blocks.
    """
    added = 0 if asked.picture is None else ADDED
    block = max(group["block_size"] for engine in (asked.p, asked.d) for group in attention(engine))
    blocks = max(3, 256 // block)  # windows and chunks are of 64 tokens
    most = (blocks - 1) * block
    # The first one's window begins within its last whole block, whose window begins before it.
    lengths = [blocks * block + block // 2 - 3 - added, most + 1 - added, 21, 40, 64, 30]
    first, whole, *ends = prompts((asked.name, asked.d.log.stem), lengths)
    first, whole, *ends = ([token % IMAGE for token in tokens] for tokens in (first, whole, *ends))
    if asked.picture is not None:
        first[9] = whole[9] = IMAGE
    expected = asked.handed_over(first, "first")
    other = asked.plainly(ends[0][:8] + first[8:]).result()
    print(f"{asked.name}: eight other tokens at the beginning change {distance(other, expected):.2g} nats")
    assert distance(other, expected) > 100 * noise(asked.name), "an answer that shows nothing"
    asked.at_d(first, "the same again")
    asked.at_d(first[: blocks * block - added] + ends[0], "all of its whole blocks")
    asked.at_d(first[: block + 5 - added] + ends[1], "a block and a bit")
    asked.handed_over(first[: most - added] + ends[2], "a second hand-off, partly cached")
    asked.handed_over(whole, "all but one token in whole blocks")
    assert asked.at_d(whole[:-1] + ends[3], "its whole blocks") == (most if hit else 0)
    if asked.picture is not None:
        asked.picture += 1
        assert asked.at_d(whole[:-1] + ends[3], "its whole blocks, with another picture") == 0
    return 3


def attention(engine: Engine) -> list[dict[str, Any]]:
    return [group for group in engine.rpc("e2e_groups")[0] if "Mamba" not in group["kind"]]


@dataclass
class _Asked:
    """Sends prompts to a plain engine, and to P and D, and compares; all prompts have the same picture."""

    name: str
    p: Engine
    d: Engine
    plain: Engine
    picture: int | None

    def plainly(self, prompt: list[int]) -> Future[Answer]:
        return self.plain.generate(prompt, max_tokens=16, pictures=self._pictures)

    def handed_over(self, prompt: list[int], what: str) -> Answer:
        expected = self.plainly(prompt)
        told = prefill(self.p, prompt, pictures=self._pictures)
        got = decode(self.d, prompt, told, pictures=self._pictures).result()
        same(self.name, got, expected.result(), f"{what}, {len(prompt)} tokens")
        return expected.result()

    def at_d(self, prompt: list[int], what: str) -> int:
        """Ask D alone. Returns how many tokens its prefix cache had."""
        expected = self.plainly(prompt)
        before = self.d.sample("vllm:prefix_cache_hits_total")
        got = self.d.generate(prompt, max_tokens=16, pictures=self._pictures).result()
        hit = int(self.d.sample("vllm:prefix_cache_hits_total") - before)
        print(f"{self.name}, {what}: {hit} of {len(prompt)} tokens in D's prefix cache")
        same(self.name, got, expected.result(), f"{what}, {len(prompt)} tokens, {hit} of them cached")
        return hit

    @property
    def _pictures(self) -> tuple[int, ...]:
        return () if self.picture is None else (self.picture,)
