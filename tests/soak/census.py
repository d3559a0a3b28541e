# SPDX-License-Identifier: Apache-2.0
"""Prompts, and what an engine without connector answers to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.engines import Answer, Engine

MAX_TOKENS = 16
PROMPTS = 96
BLOCK = 32
"""A part of a prompt that ends a little after a multiple of this hits other blocks than a longer part."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and the plain engine's answer.

    Attributes:
        tokens: of the prompt.
        plain: the answer.
        parts: beginnings of the prompt, for questions that may hit the blocks of a hand-off.
        turn: the next turn of the chat, which begins with this prompt and its answer.
    """

    tokens: Sequence[int]
    plain: Answer
    parts: tuple[Prompt, ...] = ()
    turn: Prompt | None = None


def draw_prompts(seed: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of all lengths, a third of them with a shared beginning; and for each, the ends of parts of it.

    The parts of the first prompt end behind each of its blocks.
    """
    rng = random.Random(f"{seed} prompts")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(256) for _ in range(count)]

    shared = [tokens(length) for length in (64, 200, 480)]
    made = [tokens(rng.choice([1, 2, 31, 32, 33, 65, 100, 150, 301, 450, 700, 1200, 1900])) for _ in range(PROMPTS)]
    for at in range(0, PROMPTS, 3):
        made[at] = (rng.choice(shared) + made[at])[:2000]
    made[0] = tokens(700)
    ends = []
    for number, prompt in enumerate(made):
        able = range(BLOCK, len(prompt) - 1, BLOCK)
        drawn = list(able) if number == 0 else sorted(rng.sample(able, min(3, len(able))))
        ends.append([end + rng.choice([1, 1, 2, 17]) for end in drawn])
    return made, [[end for end in of if end < len(prompt)] for prompt, of in zip(made, ends, strict=True)]


def take_census(plain: Engine, seed: str) -> list[Prompt]:
    """Ask an engine without connector everything."""

    def ask(prompts: Sequence[Sequence[int]]) -> list[Answer]:
        return [future.result() for future in [plain.generate(one, max_tokens=MAX_TOKENS) for one in prompts]]

    made, ends = draw_prompts(seed)
    found = [Prompt(prompt, answer) for prompt, answer in zip(made, ask(made), strict=True)]
    parts = [[prompt[:end] for end in of] for prompt, of in zip(made, ends, strict=True)]
    answers = iter(ask([part for of in parts for part in of]))
    parts_of = [tuple(Prompt(part, next(answers)) for part in of) for of in parts]
    turns = _ask_turns(found, ask, random.Random(f"{seed} turns"))
    return [
        Prompt(one.tokens, one.plain, of, turns.get(at))
        for at, (one, of) in enumerate(zip(found, parts_of, strict=True))
    ]


def _ask_turns(found: Sequence[Prompt], ask: Any, rng: random.Random) -> dict[int, Prompt]:
    """The second and third turns of chats that begin with every third prompt, by its number."""
    levels: list[dict[int, Prompt]] = [
        {at: one for at, one in enumerate(found) if at % 3 == 1 and len(one.tokens) < 1300}
    ]
    for _ in range(2):
        last = levels[-1]
        prompts = [
            [*one.tokens, *one.plain.token_ids, *(rng.randrange(256) for _ in range(rng.choice([1, 20, 65, 130])))]
            for one in last.values()
        ]
        levels.append({at: Prompt(p, a) for at, p, a in zip(last, prompts, ask(prompts), strict=True)})
    _, second, third = levels
    return {at: Prompt(one.tokens, one.plain, turn=third[at]) for at, one in second.items()}
