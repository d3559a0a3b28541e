# SPDX-License-Identifier: Apache-2.0
"""Defects that the cache oracle has to find: each breaks one rule that keeps the prefix cache right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvhma.geometry import Group, Span
from kvhma.vllm import connector as connector_module
from kvhma.vllm import metadata as metadata_module
from kvhma.vllm import scheduler as scheduler_module
from kvhma.vllm.holds import prefill as prefill_module
from kvhma.vllm.internals import hit_each_group
from kvhma.vllm.loads import decode as decode_module
from kvhma.vllm.loads.decode import DecodeScheduler
from kvhma.vllm.metadata import ReadCommand
from kvhma.vllm.options.next_turns import scheduler as next_turns
from kvhma.vllm.prompts import prompt_digests
from kvhma.vllm.reads import read_steps
from kvhma.vllm.scheduler import KvhmaScheduler

Patch = Callable[[pytest.MonkeyPatch], None]
Mutants = dict[str, tuple[Patch, tuple[str, ...]]]

MUTANTS: Mutants = {}
"""By description: the defect, and the mixes of groups where it shows."""

TURN_MUTANTS: Mutants = {}
"""The same for defects in how answers are read."""

WINDOWS = ("sliding", "full+sliding", "mla+sliding_mla", "full+two windows")


def mutant(name: str, *mixes: str, into: Mutants = MUTANTS) -> Callable[[Patch], Patch]:
    def enter(patch: Patch) -> Patch:
        into[name] = (patch, mixes)
        return patch

    return enter


def _spans_of_d(patch: pytest.MonkeyPatch, change: Callable[[Group, Span, int], Span]) -> None:
    """Change what D asks for; `change` takes a group, its span, and the tokens that vLLM says were hit."""
    load = DecodeScheduler._read_command

    def wrong(self: DecodeScheduler, *given: Any) -> ReadCommand:
        asked = load(self, *given)
        groups = zip(self._context.geometry.groups, asked.spans, strict=True)
        return asked._replace(spans=tuple(change(group, span, asked.cached) for group, span in groups))

    patch.setattr(DecodeScheduler, "_read_command", wrong)


@mutant("P names only what the next token attends to, and D caches all of it", *WINDOWS)
def only_the_window(patch: pytest.MonkeyPatch) -> None:
    never_marked(patch)
    finish, right = KvhmaScheduler.on_request_finished, prefill_module.live_spans
    tokens: list[int] = []

    def wrong(geometry: Any, num_tokens: Any, tables: Any, cached: Any = None) -> list[Span]:
        return right(geometry, tokens[-1] if num_tokens is None else num_tokens, tables, cached)

    def finished(self: KvhmaScheduler, request: Any, tables: Any) -> Any:
        tokens.append(min(request.num_computed_tokens, request.num_prompt_tokens))
        return finish(self, request, tables)

    patch.setattr(prefill_module, "live_spans", wrong)
    patch.setattr(KvhmaScheduler, "on_request_finished", finished)


@mutant("D caches blocks that are filled in part", *WINDOWS)
def never_marked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decode_module, "mark_uncacheable", lambda *_: None)


@mutant("the worker's report is lost", *WINDOWS)
def report_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(read_steps, "first_filled_tokens", lambda *_: {})


@mutant("the report of one rank stands for all", "full+two windows", "sliding+chunked")
def one_rank(patch: pytest.MonkeyPatch) -> None:
    def first(one: Any, other: Any) -> dict[int, int]:
        return dict(one or other)

    patch.setattr(metadata_module, "merge_first_tokens", first)
    patch.setattr(decode_module, "merge_first_tokens", first)


@mutant("of two ranks the earlier token counts", "full+sliding", "mla+sliding_mla")
def earlier(patch: pytest.MonkeyPatch) -> None:
    def least(one: Any, other: Any) -> dict[int, int]:
        return {group: min(one.get(group, 0), other.get(group, 0)) for group in one.keys() | other.keys()}

    patch.setattr(metadata_module, "merge_first_tokens", least)


@mutant("one block too few is kept out", *WINDOWS)
def one_block_less(patch: pytest.MonkeyPatch) -> None:
    right = decode_module.mark_uncacheable

    def wrong(manager: Any, request_id: str, group: int, token: int) -> None:
        size = manager.coordinator.single_type_managers[group].block_size
        right(manager, request_id, group, token // size * size)

    patch.setattr(decode_module, "mark_uncacheable", wrong)


@mutant("the blocks of another group are kept out", "full+sliding", "full+two windows", "mla+sliding_mla")
def another_group(patch: pytest.MonkeyPatch) -> None:
    right = decode_module.mark_uncacheable

    def wrong(manager: Any, request_id: str, group: int, token: int) -> None:
        right(manager, request_id, (group + 1) % len(manager.coordinator.single_type_managers), token)

    patch.setattr(decode_module, "mark_uncacheable", wrong)


@mutant("blocks are kept out once they are in", *WINDOWS)
def too_late(patch: pytest.MonkeyPatch) -> None:
    marked = DecodeScheduler._exclude_partial_blocks
    step = KvhmaScheduler.on_step
    left: list[Any] = []

    def wrong(self: DecodeScheduler, *arguments: Any) -> None:
        left.append(arguments)

    def late(self: KvhmaScheduler, output: Any) -> Any:
        while left:
            marked(self.decode, *left.pop())
        return step(self, output)

    patch.setattr(DecodeScheduler, "_exclude_partial_blocks", wrong)
    patch.setattr(KvhmaScheduler, "on_step", late)


@mutant("the hit of full attention counts for all groups", *WINDOWS[1:], "full+chunked", "full+sliding+state")
def one_hit(patch: pytest.MonkeyPatch) -> None:
    def cut(group: Any, span: Span, cached: int) -> Span:
        first = max(span.first, cached // group.block_size)
        return span if group.kind == "ssm" else Span(first, span.ids[first - span.first :])

    _spans_of_d(patch, cut)


@mutant("a hit of full attention alone stays where nothing is loaded", *WINDOWS[1:])
def kept_without_a_load(patch: pytest.MonkeyPatch) -> None:
    def wrong(manager: Any, tokens_to_load: Any) -> None:
        hit_each_group(manager, lambda request: tokens_to_load(request) or request.num_tokens)
        ask = manager.get_computed_blocks_for_connector
        vars(manager)["get_computed_blocks_for_connector"] = lambda *given: (*ask(*given)[:3], False)

    patch.setattr(scheduler_module, "hit_each_group", wrong)


@mutant("a window without a hit has null blocks up to that of full attention", *WINDOWS[1:], "full+chunked")
def null_blocks(patch: pytest.MonkeyPatch) -> None:
    def wrong(manager: Any, tokens_to_load: Any) -> None:
        hit_each_group(manager, tokens_to_load)
        ask, pool = manager.get_computed_blocks_for_connector, manager.block_pool

        def padded(*given: Any) -> Any:
            blocks, hit, boundary, diverged = ask(*given)
            singles = manager.coordinator.single_type_managers
            tables = [
                [*table, *[pool.null_block] * (hit // single.block_size - len(table))]
                for single, table in zip(singles, blocks.blocks, strict=True)
            ]
            return manager.create_kv_cache_blocks(tuple(tables)), hit, boundary, diverged

        vars(manager)["get_computed_blocks_for_connector"] = padded

    patch.setattr(scheduler_module, "hit_each_group", wrong)


@mutant("blocks that were hit are written", "full", "full+sliding", "full+state")
def hits_written(patch: pytest.MonkeyPatch) -> None:
    right = decode_module.spans_to_fill

    def wrong(geometry: Any, num_tokens: int, tables: Any) -> tuple[Span, ...]:
        return right(geometry, num_tokens, [[_never_hit(block) for block in table] for table in tables])

    patch.setattr(decode_module, "spans_to_fill", wrong)


def _never_hit(block: Any) -> SimpleNamespace:
    return SimpleNamespace(is_null=False, block_hash=None, block_id=block.block_id)


@mutant("a state is not read where D has a hit of attention", "full+state", "full+state+state")
def state_left_out(patch: pytest.MonkeyPatch) -> None:
    _spans_of_d(patch, lambda group, span, cached: Span(0, []) if group.kind == "ssm" and cached else span)


@mutant("the first block of a chunk is left out", "chunked", "full+chunked", "sliding+chunked")
def chunk_cut(patch: pytest.MonkeyPatch) -> None:
    _spans_of_d(
        patch,
        lambda group, span, cached: (
            Span(span.first + 1, span.ids[1:]) if group.kind == "chunked" and len(span.ids) > 1 else span
        ),
    )


@mutant("P's blocks are taken for the next ones", "full", "full+sliding")
def one_further(patch: pytest.MonkeyPatch) -> None:
    right = prefill_module.live_spans

    def wrong(geometry: Any, num_tokens: Any, tables: Any, hits: Any = None) -> list[Span]:
        spans = right(geometry, num_tokens, tables, hits)
        if hits is not None:
            return spans
        return [
            Span(span.first, [*span.ids[1:], span.ids[0]]) if group.kind != "ssm" and len(span.ids) else span
            for group, span in zip(geometry.groups, spans, strict=True)
        ]

    patch.setattr(prefill_module, "live_spans", wrong)


@mutant("P computes the last token as well", "full+state", "sliding+state")
def no_backoff(patch: pytest.MonkeyPatch) -> None:
    right = connector_module.engine_facts
    patch.setattr(connector_module, "engine_facts", lambda *given: dataclasses.replace(right(*given), backoff=0))


@mutant("D takes the cache of another prompt", "full", "full+sliding", "full+state")
def any_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prompt_digests, "prompt_digest", lambda *_, **__: "0" * 32)


@mutant("the token that ends an answer is taken for computed", "full", "full+sliding", "full+state", into=TURN_MUTANTS)
def one_more(patch: pytest.MonkeyPatch) -> None:
    right = next_turns.Room._tokens_written
    patch.setattr(next_turns.Room, "_tokens_written", lambda self, asked: min(right(self, asked) + 1, asked.num_tokens))


@mutant("a state in the making is taken for that of the step before", "state", "full+state", into=TURN_MUTANTS)
def state_in_flight(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: next_turns.Room, asked: Any) -> int:
        return int(asked.num_computed_tokens - asked.num_in_flight_tokens)

    patch.setattr(next_turns.Room, "_tokens_written", wrong)


@mutant("blocks that a load has not filled are named for the next turn", *WINDOWS, into=TURN_MUTANTS)
def unfilled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(next_turns, "filled_spans", lambda geometry, spans, unfilled: spans)


@mutant("any part of an answer agrees", "full", "full+chunked", into=TURN_MUTANTS)
def any_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prompt_digests, "prefix_digests", lambda _, counts, *__: ["0" * 32] * len(counts))


@mutant("an answer that was evicted during the read counts", "full", "full+sliding", "full+state", into=TURN_MUTANTS)
def no_check(patch: pytest.MonkeyPatch) -> None:
    right = DecodeScheduler._read_ended

    def wrong(self: DecodeScheduler, load: Any, *, failed: bool) -> None:
        load.attempt.rank_failed = load.attempt.rank_failed and not load.is_optional
        right(self, load, failed=failed and not load.is_optional)

    patch.setattr(DecodeScheduler, "_read_ended", wrong)
