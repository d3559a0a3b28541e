# SPDX-License-Identifier: Apache-2.0
"""Chats of several turns: P reads D's answer of the last turn, and computes what is new."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from support.engines import REMOTE_DECODE, Answer, Engine, Zygote, engines, free_port
from support.handoff import all_free, arguments, computed, decode, kvhma, loads, prompts, same
from support.waiting import until

Models = Callable[[str], Path]
TURNS = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0, "handshake_timeout": 2}
FIRST, NEW, ANSWER = 301, (40, 65), 24


@dataclass
class Turn:
    """P's work for one turn of a chat.

    Attributes:
        prompt: its tokens.
        computed: tokens of it that P computed.
        read: tokens that it read from D.
        megabytes: bytes read, in MB.
    """

    prompt: list[int]
    computed: int
    read: int
    megabytes: float


class Chat:
    """One chat with P and D."""

    def __init__(self, p: Engine, d: Engine, plain: Engine, name: str) -> None:
        self.p, self.d, self.plain, self.name = p, d, plain, name
        self.params: dict[str, Any] | None = None
        self.said: list[int] = []

    def _counted(self) -> tuple[int, int, float]:
        own = self.p.sample("vllm:prompt_tokens_by_source_total", source="local_compute")
        return int(own), self.p.loaded_tokens(), self.p.sample("vllm:kvhma_bytes_sum")

    def turn(self, prompt: Sequence[int]) -> Turn:
        """Send a message, and compare the answer with the plain engine's."""
        expected = self.plain.generate(prompt, max_tokens=ANSWER).result()
        before = self._counted()
        asked = self.params or REMOTE_DECODE
        told = self.p.generate(prompt, max_tokens=1, kv_transfer_params=asked).result()
        assert told.error is None, told
        assert told.kv_transfer_params is not None, told
        after = self._counted()
        got: Answer = decode(self.d, prompt, told.kv_transfer_params, max_tokens=ANSWER).result()
        # The plain engine computes in one piece what P and D have computed in several.
        same(self.name, got, expected, f"of {len(prompt)} tokens", alone=0)
        self.params = json.loads(json.dumps(got.kv_transfer_params))
        self.said = [*prompt, *got.token_ids]
        own, read, moved = (one - other for one, other in zip(after, before, strict=True))
        return Turn(list(prompt), int(own), int(read), moved / 1e6)


def settings_of(name: str, **more: Any) -> dict[str, Any]:
    return {
        "p": kvhma(name, extra=TURNS, **more),
        "d": kvhma(name, extra=TURNS),
        "plain": arguments(name),
    }


@pytest.mark.parametrize(
    "name", [pytest.param("llama", marks=pytest.mark.smoke), "gpt_oss", "nemotron_h", "qwen3_next"]
)
def test_three_turns(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    with engines(zygote, model(name), tmp_path, **settings_of(name)) as (p, d, plain):
        chat = Chat(p, d, plain, name)
        left_to_d = 0 if name == "llama" else 1
        first, *new = prompts((name, "turns"), [FIRST, *NEW])
        turns = [chat.turn(first)]
        assert (turns[0].computed, turns[0].read) == (FIRST - left_to_d, 0)
        for words in new:
            known = len(chat.said) - 1  # the last token of an answer is never computed
            turn = chat.turn([*chat.said, *words])
            turns.append(turn)
            assert turn.read == known
            assert turn.computed == len(words) + 1 - left_to_d
            assert turn.megabytes > 0
        for number, turn in enumerate(turns, 1):
            print(
                f"{name}: turn {number}: {len(turn.prompt)} tokens, P computed {turn.computed}, read {turn.read} "
                f"({turn.megabytes:.2f} MB)"
            )
        assert loads(p) == len(new)
        until(lambda: d.sample("vllm:kvhma_answers_total", end="read") == len(new))
        # Only the last answer is left, which D evicts when a request needs its blocks.
        assert list(d.state()["requests"].values()) == ["kept"]
        all_free(p)


def test_d_restarted_between_two_turns(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """Its answers are gone with it; a prefill does not fail for that, with any policy."""
    settings = settings_of("llama")
    settings["d"]["env"] = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    with engines(zygote, model("llama"), tmp_path, **settings) as (p, d, plain):
        chat = Chat(p, d, plain, "llama")
        first, *new = prompts("restart", [FIRST, 40, 40, 40])
        chat.turn(first)
        assert chat.turn([*chat.said, *new[0]]).read > 0
        d.kill()
        # No engine listens there.
        told = p.generate([*chat.said, *new[1]], max_tokens=1, kv_transfer_params=chat.params).result()
        assert (told.error, told.finish_reason) == (None, "length")
        assert computed(p, "late_reader") == 1
        with replace(d, log=tmp_path / "again.log") as chat.d:
            turn = chat.turn([*chat.said, *new[1]])
            assert (turn.computed, turn.read) == (len(turn.prompt), 0)
            assert computed(p, "late_reader") == 2
            # From then on everything is as before.
            assert chat.turn([*chat.said, *new[2]]).read > len(turn.prompt)
