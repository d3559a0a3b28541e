# SPDX-License-Identifier: Apache-2.0
"""D's prefix-cache hits of each group, with vLLM's real manager of blocks. The cache oracle reads the bytes."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

import kvhma
from kvhma.models import model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.vllm.internals import hit_each_group

BLOCK = 16
HEADS = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**HEADS)
WINDOW, SHORT = (SlidingWindowSpec(**HEADS, sliding_window=tokens) for tokens in (100, 24))
CHUNK = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=128)
MLA = MLAAttentionSpec(**HEADS)
STATE = MambaSpec(
    block_size=BLOCK,
    shapes=((3, 8), (8, 8)),
    dtypes=(torch.float32,) * 2,
    mamba_cache_mode="align",
    mamba_type="mamba2",
)
MIXES = {
    "full+sliding": (FULL, WINDOW),
    "full+two windows": (FULL, WINDOW, SHORT),
    "mla+sliding": (MLA, WINDOW),
    "full+chunked": (FULL, CHUNK),
    "full+state": (FULL, STATE),
    "full+sliding+state": (FULL, WINDOW, STATE),
    "full": (FULL,),
    "sliding": (WINDOW,),
}

init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)


def request_of(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=400), None, block_hasher=HASHER)


class Decode:
    """A decode engine's manager of blocks; requests are loaded as vLLM's scheduler does it, without bytes."""

    def __init__(self, mix: str | Sequence[KVCacheSpec], blocks: int = 4000) -> None:
        specs = MIXES[mix] if isinstance(mix, str) else mix
        groups = [KVCacheGroupSpec([f"layers.{index}"], spec) for index, spec in enumerate(specs)]
        config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        block = specs[0].block_size
        self.manager = KVCacheManager(config, 1 << 18, block, block, enable_caching=True)
        self.vllm = KVCacheManager.get_computed_blocks_for_connector.__get__(self.manager)
        self.to_load = 0
        hit_each_group(self.manager, lambda request: self.to_load)

    def ask(self, request: Request, to_load: int) -> tuple[list[list[int]], int, int, bool]:
        """Return the ids of the hit blocks by group, the tokens hit, vLLM's boundary, and whether groups differ."""
        self.to_load = to_load
        return as_ids(self.manager.get_computed_blocks_for_connector(request))

    def load(self, tokens: list[int], answer: int = 0) -> int:
        """Load a prompt, answer, and free it; return the hit."""
        return max(self.serve(request_of(f"r{random.random()}", tokens), answer))

    def serve(self, request: Request, answer: int, *, each_group: bool = True, left: int = 1) -> list[int]:
        """Load a request's prompt without its last `left` tokens, answer, and free it.

        Returns:
            The hit of each group, or by vLLM's own rule.
        """
        length = request.num_prompt_tokens
        self.to_load = length - left
        self.manager.new_step_starts()
        ask = self.manager.get_computed_blocks_for_connector if each_group else self.vllm
        blocks, hit, _, diverged = ask(request)
        external = max(0, self.to_load - hit)
        if diverged and not external:
            blocks, hit, _ = self.manager.get_computed_blocks(request)
        slots = self.manager.allocate_slots(
            request,
            0 if external else length - hit,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_external_computed_tokens=external,
            delay_cache_blocks=bool(external),
        )
        assert slots is not None
        request.num_computed_tokens = hit + external if external else length
        self.manager.cache_blocks(request, request.num_computed_tokens)
        request.append_output_token_ids(list(range(answer)))
        assert not answer or self.manager.allocate_slots(request, answer) is not None
        self.manager.free(request)
        single = self.manager.coordinator.single_type_managers
        return [len(table) * group.block_size for table, group in zip(blocks.blocks, single, strict=True)]

    def cached(self, request: Request, group: int) -> list[bool]:
        """Return for each whole block of a prompt whether a group has it, by the pool's own index."""
        pool = self.manager.block_pool
        return [pool.get_cached_block(digest, [group]) is not None for digest in request.block_hashes]


def as_ids(answer) -> tuple[list[list[int]], int, int, bool]:
    blocks, hit, boundary, diverged = answer
    return [[block.block_id for block in group] for group in blocks.blocks], hit, boundary, diverged


def has_all(cached: list[bool], spec: object, tokens: int) -> bool:
    """Return whether a group has all that the token after the first `tokens` attends to."""
    if isinstance(spec, FullAttentionSpec):
        first = 0
    elif isinstance(spec, SlidingWindowSpec):
        first = max(0, tokens - spec.sliding_window + 1)
    else:
        first = tokens // spec.attention_chunk_size * spec.attention_chunk_size
    return all(cached[first // BLOCK : tokens // BLOCK])


def history(d: Decode, rng: random.Random) -> list[int]:
    """Load prompts that share beginnings, evict some blocks, and return a prompt that shares one with them."""
    document = [rng.randrange(10**6) for _ in range(rng.randrange(100, 700))]
    for _ in range(rng.randint(1, 4)):
        d.load(
            document[: rng.randrange(20, len(document))] + [rng.randrange(10**6)] * rng.randrange(1, 60),
            rng.randrange(40),
        )
    if rng.random() < 0.5:
        ids = range(1, d.manager.block_pool.num_gpu_blocks)
        d.manager.evict_blocks(set(rng.sample(ids[:200], rng.randrange(60))))
    return document[: rng.randrange(17, len(document))] + [rng.randrange(10**6)] * rng.choice((0, 0, 1, 30))


@pytest.mark.parametrize("mix", ["full+sliding", "full+two windows", "mla+sliding", "full+chunked"])
def test_full_attentions_hit_counts_and_one_token_is_left_to_the_load(mix: str) -> None:
    """The hit is the longest beginning that full attention has; it differs if another group lacks some of it."""
    seen = {True: 0, False: 0}
    for seed in range(150):
        rng = random.Random(seed)
        d = Decode(mix)
        request = request_of("q", history(d, rng))
        loaded = request.num_tokens - rng.choice((0, 1, 1, 1, 5))
        _, usual, _, _ = as_ids(d.vllm(request))
        ids, hit, boundary, diverged = d.ask(request, loaded)
        blocks = d.cached(request, 0)
        full = next((index for index, has in enumerate(blocks) if not has), len(blocks)) * BLOCK
        whole = min(full, (request.num_tokens - 1) // BLOCK * BLOCK)
        cut = min(full, (loaded - 1) // BLOCK * BLOCK)
        specs = MIXES[mix]
        lacks = [not has_all(d.cached(request, index), spec, cut) for index, spec in enumerate(specs)]
        if usual == whole or not any(lacks):
            assert (hit, diverged) in {(usual, False), (cut, False)}, f"seed {seed}"
        else:
            assert (hit, diverged) == (cut, True), f"seed {seed}"
        assert hit >= min(usual, cut)
        assert boundary == 0 or not diverged
        assert len(ids[0]) == hit // BLOCK
        for index, group in enumerate(ids):
            named = [number for number, block in enumerate(group) if block != 0]
            assert len(group) <= hit // BLOCK
            assert all(d.cached(request, index)[number] for number in named), f"seed {seed}: group {index}"
        seen[diverged] += 1
    assert min(seen.values()) > 10


@pytest.mark.parametrize("mix", MIXES)
def test_without_a_load_vllms_answer_counts(mix: str) -> None:
    for seed in range(40):
        d = Decode(mix)
        request = request_of("q", history(d, random.Random(seed)))
        assert d.ask(request, 0) == as_ids(d.vllm(request)), f"seed {seed}"


@pytest.mark.parametrize("mix", MIXES)
def test_equal_hits_are_vllms_answer(mix: str) -> None:
    """The next turn of a conversation, which D has answered itself: all groups have the same hit."""
    for seed in range(40):
        rng = random.Random(seed)
        d = Decode(mix)
        prompt = [rng.randrange(10**6) for _ in range(rng.randrange(100, 400))]
        d.load(prompt, answer=BLOCK)
        request = request_of("q", [*prompt, *range(BLOCK), *([7] * rng.randrange(BLOCK, 90))])
        expected = as_ids(d.vllm(request))
        assert d.ask(request, request.num_tokens - 1) == expected, f"seed {seed}"
        assert (expected[1], expected[3]) == ((len(prompt) + BLOCK - 1) // BLOCK * BLOCK, False)


@pytest.mark.parametrize("mix", ["full+state", "full+sliding+state"])
def test_models_with_states_differ_only_where_nothing_would_be_left_to_load(mix: str) -> None:
    changed = 0
    for seed in range(150):
        d = Decode(mix)
        request = request_of("q", history(d, random.Random(seed)))
        loaded = request.num_tokens - 1
        expected, found = as_ids(d.vllm(request)), d.ask(request, loaded)
        if expected[3] and expected[1] >= loaded:
            changed += 1
            assert found[1] == (loaded - 1) // BLOCK * BLOCK
        else:
            assert found == expected, f"seed {seed}"
    assert changed > 0


@pytest.mark.parametrize("mix", ["full+sliding", "full+two windows", "full+chunked", "full+state"])
def test_a_load_of_less_than_vllm_hits_by_itself_takes_nothing_away(mix: str) -> None:
    """Another engine may hold only the beginning of what this one has, as of an earlier turn."""
    for seed in range(100):
        rng = random.Random(seed)
        d = Decode(mix)
        prompt = [rng.randrange(10**6) for _ in range(rng.randrange(100, 700))]
        d.load(prompt, answer=BLOCK)
        turn = [*prompt, *range(BLOCK), *(rng.randrange(10**6) for _ in range(400))]
        d.load(turn)
        request = request_of("q", turn[: len(prompt) + 200])
        usual = d.manager.get_computed_blocks(request)[1]
        assert len(prompt) // BLOCK * BLOCK <= usual <= d.ask(request, request.num_tokens - 1)[1]
        assert d.ask(request, rng.randint(1, usual))[1::2] == (usual, False), f"seed {seed}"


@pytest.mark.parametrize("mix", ["full+sliding", "full+two windows", "mla+sliding"])
def test_another_question_about_a_document(mix: str) -> None:
    d = Decode(mix)
    document = list(range(5000))
    assert d.load(document + [10**6] * 1003, answer=40) == 0
    assert d.load(document + [10**6 + 1] * 900) == 4992
    assert d.load(document[:4993]) == 4976  # of what it has completely, a token is left to the load


LOOKUPS = {
    "nothing": lambda document: [1] * 5000,
    "a second question": lambda document: document + [10**6 + 1] * 900,
    "its beginning": lambda document: document[:2005],
    "the next turn": lambda document: [*document, *[10**6] * 1003, *range(40), *[7] * 60],
}


@pytest.mark.parametrize("asked", LOOKUPS)
@pytest.mark.parametrize("mix", ["full+sliding", "full+two windows", "mla+sliding", "full+chunked"])
def test_no_more_blocks_are_looked_up_than_by_vllm(mix: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as by vLLM's own rule, or as by its lookup of each group up to full attention's hit."""
    looked_up, get = 0, BlockPool.get_cached_block

    def counted(self: BlockPool, digest: BlockHash, groups: list[int]) -> list[KVCacheBlock] | None:
        nonlocal looked_up
        looked_up += 1
        return get(self, digest, groups)

    monkeypatch.setattr(BlockPool, "get_cached_block", counted)
    d = Decode(mix)
    document = list(range(5000))
    d.load(document + [10**6] * 1003, answer=40)
    request = request_of("q", LOOKUPS[asked](document))
    counts = []
    hit = d.ask(request, request.num_tokens - 1)[1]
    for ask in (
        lambda: d.ask(request, request.num_tokens - 1),
        lambda: d.vllm(request),
        lambda: d.manager.coordinator.find_longest_cache_hit_per_group(request.block_hashes, hit),
    ):
        looked_up = 0
        ask()
        counts.append(looked_up)
    ours, *theirs = counts
    assert ours <= 1.1 * max(theirs) + math.log2(request.num_tokens / BLOCK), (ours, theirs)


def test_where_a_name_is_gone_hits_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    d = Decode("full+sliding")
    vars(d.manager).pop("get_computed_blocks_for_connector")
    hidden = SimpleNamespace(
        coordinator=d.manager.coordinator, kv_cache_config=d.manager.kv_cache_config, create_kv_cache_blocks=None
    )
    hit_each_group(hidden, lambda request: 100)
    assert "get_computed_blocks_for_connector" in caplog.text
    assert set(vars(hidden)) == {"coordinator", "kv_cache_config", "create_kv_cache_blocks"}


# --- what it is worth ---------------------------------------------------------------------------------------------

TRACES = Path(__file__).parents[3] / "shared" / "traces"
STEP, ID = 128, 512
"""Tokens of D's blocks here, and of an id of Mooncake's traces."""

OF_TRACES = [
    ("synthetic_first3300", 600, "gpt-oss-120b", 0.05, 0.11),
    pytest.param("synthetic_first3300", 3300, "gemma-3-27b", 0.17, 0.47, marks=pytest.mark.long),
    pytest.param("synthetic_first3300", 3300, "gpt-oss-120b", 0.18, 0.55, marks=pytest.mark.long),
    pytest.param("conversation_first3600", 3600, "gemma-3-27b", 0.29, 0.32, marks=pytest.mark.long),
    pytest.param("conversation_first3600", 3600, "gpt-oss-120b", 0.28, 0.34, marks=pytest.mark.long),
]
"""A trace and its first lines, a model, the shares of bytes that D's cache saves by vLLM's rule and by each group."""


def replayed(lines: list[str]) -> Iterator[tuple[Request, int]]:
    """Yield the requests of a trace and the tokens of their answers, with block hashes for both.

    An id names 512 tokens and all before them. A prompt continues an answer if it shares all whole ids of the
    earlier prompt and is at least as long as that with its answer. Only one prompt continues each answer.
    """
    fresh = (number.to_bytes(8, "big") for number in itertools.count())
    chains: dict[int, list[bytes]] = {}
    """By id: hashes of all blocks up to its end."""
    answered: dict[int, list[tuple[int, list[bytes]]]] = {}
    for number, entry in enumerate(map(json.loads, lines)):
        length, ids = entry["input_length"], entry["hash_ids"]
        total = length + entry["output_length"]
        known = next((at for at, name in enumerate(ids) if name not in chains), len(ids))
        chain: list[bytes] = list(chains[ids[known - 1]]) if known else []
        earlier = answered.get(ids[known - 1], []) if known else []
        if continued := [said for said in earlier if said[0] <= length]:
            earlier.remove(continued[-1])
            chain = list(continued[-1][1])
        chain += itertools.islice(fresh, total // STEP - len(chain))
        for at in range(known, len(ids)):
            chains[ids[at]] = chain[: min(length, (at + 1) * ID) // STEP]
        if length >= ID:
            answered.setdefault(ids[length // ID - 1], []).append((total, chain))
        request = Request(str(number), [0] * length, SamplingParams(max_tokens=1 << 17), None)
        request.block_hashes = chain
        yield request, entry["output_length"]


@pytest.mark.parametrize(("trace", "requests", "name", "today", "new"), OF_TRACES)
def test_share_of_bytes_that_ds_cache_saves_on_a_trace(
    trace: str, requests: int, name: str, today: float, new: float
) -> None:
    """One D whose cache never evicts, with vLLM's own manager of blocks; bytes are those of `kvhma.cost`."""
    path = TRACES / f"mooncake_{trace}.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name}: the first lines of a trace of github.com/kvcache-ai/Mooncake, FAST25-release")
    lines = path.read_text().splitlines()[:requests]
    p, d = ([layout(model(name), LayoutOptions(num_blocks=1 << 14, base=base << 44))] for base in (1, 2))
    costs, groups = kvhma.cost(d, p), d[0].groups
    window = next(group.window for group in groups if group.window)
    same = HEADS | {"block_size": STEP}
    specs = FullAttentionSpec(**same), SlidingWindowSpec(**same, sliding_window=window)
    saved = []
    for each_group in (False, True):
        engine = Decode(specs, blocks=250 * requests)
        whole = read = 0
        for request, answer in replayed(lines):
            length = request.num_prompt_tokens
            full, windows = engine.serve(request, answer, each_group=each_group)
            whole += costs.of(length).bytes
            read += costs.of(length, [windows if group.window else full for group in groups]).bytes
        saved.append(1 - read / whole)
    print(f"{trace}, {name}: saved {saved[0]:.3f} by vLLM's rule, {saved[1]:.3f} by hits of each group")
    assert saved == pytest.approx([today, new], abs=0.02)
