# SPDX-License-Identifier: Apache-2.0
"""A trained model and real texts: D answers as a plain engine does, for the model and for its hybrid twin.

Tiny models have random weights. In a trained model other tokens weigh, heads differ, and three KV heads go to three
ranks. `make real-model` writes the model.
"""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from support.engines import Answer, Zygote, engines
from support.engines.compare import difference, distance
from support.engines.zygote import ENVIRONMENT, REPO, engine_python
from support.handoff import decode, kvhma, loads, prefill

MODELS = REPO / "models"
LANGUAGES = REPO / "tests/support/languages.txt"
SOURCES = (
    *("docs/geometry.md", "docs/start.md", "docs/hybrid.md", "docs/security.md", "docs/operations.md", "Makefile"),
    *("python/kvhma/cli/serve_pair.py", "python/kvhma/costs.py", "python/kvhma/nixl/agent.py", "CONTRIBUTING.md"),
    *("python/kvhma/vllm/loads/decode.py", "rust/core/src/pairing/plan.rs", "rust/core/src/request/block_pairs.rs"),
    *("rust/core/src/form/check.rs", "tests/e2e/test_topologies.py", "examples/grafana/kvhma.json", "docs/vllm.md"),
)
PROMPTS = 50
SHORTEST, LONGEST = 100, 4000
ANSWER = 24
NATS = 1e-4
"""By how much a log-probability may differ from a plain engine's."""

ENCODE = """
import json, sys
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
longest = int(sys.argv[2])

def prompt(text, length):
    whole = tokenizer(text)["input_ids"]
    while True:
        message = {"role": "user", "content": tokenizer.decode(whole[:length])}
        ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        if len(ids) <= longest:
            return ids
        length -= len(ids) - longest

print(json.dumps([prompt(*given) for given in json.load(sys.stdin)]))
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (MODELS / "smollm2-hybrid").is_dir(), reason="make real-model writes a real model"),
]


def texts() -> list[tuple[str, int]]:
    """Paragraphs in fifteen languages, all of them together, and the beginnings of pages and programs."""
    paragraphs = LANGUAGES.read_text(encoding="utf-8").split("\n\n")
    found = [(text, LONGEST) for text in (*paragraphs, "\n\n".join(paragraphs))]
    rest = PROMPTS - len(found)
    for at in range(rest):
        source = SOURCES[at % len(SOURCES)]
        asked = f"Explain this file, {source}, in two sentences.\n\n"
        length = round(SHORTEST * (LONGEST / SHORTEST) ** (at / (rest - 1)))
        found.append((asked + 4 * (REPO / source).read_text(encoding="utf-8"), length))
    return found


def encoded(model: Path) -> list[list[int]]:
    """The texts as prompts of a chat, in tokens."""
    done = subprocess.run(
        [engine_python(), "-c", ENCODE, str(model), str(LONGEST)],
        input=json.dumps(texts()),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [list(ids) for ids in json.loads(done.stdout)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "block"), [("smollm2", 32), ("smollm2-hybrid", 64)])
def test_fifty_prompts(name: str, block: int, zygote: Zygote, tmp_path: Path) -> None:
    """D with one rank and D with three read each prompt from P, which has blocks of 32 tokens."""
    prompts = encoded(MODELS / name)
    lengths = [len(prompt) for prompt in prompts]
    assert len(set(map(tuple, prompts))) == PROMPTS
    assert min(lengths) >= SHORTEST
    assert max(lengths) > 0.95 * LONGEST
    common: dict[str, Any] = {"max_model_len": 4200, "kv_cache_memory_bytes": 512 << 20}
    three = {"tensor_parallel_size": 3, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1|0"}}
    settings = {
        "p": kvhma(name, enable_prefix_caching=True, **common),  # the second D's prompt is in P's cache
        "one": kvhma(name, block_size=block, **common),
        "three": kvhma(name, block_size=block, **common, **three),
        "plain": {"dtype": "float32"} | common,
    }
    with engines(zygote, MODELS / name, tmp_path, **settings) as (p, one, three, plain):
        groups = [engine.rpc("e2e_groups")[0] for engine in (p, one, three)]
        assert [group[0]["block_size"] for group in groups] == [32, block, block]
        windows = {any("Sliding" in group["kind"] for group in of_engine) for of_engine in groups}
        assert windows == {name == "smollm2-hybrid"}
        wanted = [plain.generate(prompt, max_tokens=ANSWER, timeout=None) for prompt in prompts]
        got: list[list[Future[Answer]]] = []
        for prompt in prompts:
            given = [prefill(p, prompt, timeout=None) for _ in range(2)]
            asked = zip((one, three), given, strict=True)
            got.append([decode(d, prompt, params, max_tokens=ANSWER, timeout=None) for d, params in asked])
            for answer in got[-6:][0]:  # D decodes some prompts together, while P computes the next
                answer.result()
        for number, ranks in enumerate((1, 3)):
            pairs = [(ds[number].result(), right.result()) for ds, right in zip(got, wanted, strict=True)]
            wrong = {at: found for at, pair in enumerate(pairs) if (found := difference(*pair, NATS))}
            equal = sum(answer.token_ids == right.token_ids for answer, right in pairs)
            worst = max(distance(*pair) for pair in pairs)
            print(f"{name}, {ranks} ranks: {equal} of {PROMPTS} equal, at most {worst:.2g} nats from the plain engine")
            assert not wrong
        # Without a hand-off D computes the prompt itself, and answers as well.
        left = PROMPTS if True in windows else 0  # P leaves the last token to D if a layer has a window
        for d, ranks in ((one, 1), (three, 3)):
            assert loads(d) == ranks * PROMPTS
            assert d.loaded_tokens() == sum(lengths) - left
            assert d.sample("vllm:kvhma_failed_loads_total") == 0
            assert d.sample("vllm:kvhma_local_prefills_total") == 0
        for engine in (p, one, three):
            engine.idle()
