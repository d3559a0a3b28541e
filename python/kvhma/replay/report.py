# SPDX-License-Identifier: Apache-2.0
"""Replays a trace against two engines: prefix hits, bytes and the links that they need.

Hits follow vLLM's rules for each kind of group, and requests run one after the other: an engine holds nothing besides
its cache. Tokens of answers have no identity in a trace, so no later prompt hits them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import prefix_hits, turns
from kvhma.costs import Costs, HandOffCost, Link, cost
from kvhma.geometry import Geometry, Group
from kvhma.replay.columns import Trace, grid_of
from kvhma.replay.policies import Ways, compare

Route: TypeAlias = Literal["turns", "session", "hash", "round-robin"]
"""How requests find an engine; docs/replay.md defines them."""

Side: TypeAlias = Literal["prefill", "decode"]
"""Who fills a cache. P computes; D loads, and has two rules: all groups hit the same, or each its own."""

LINKS = (10, 25, 100, 400)
"""Gb/s of the links that are compared."""
_WINDOWS = (1, 10)
"""Seconds over which a rate is taken."""
_POINTS = 300
"""Limit of the times in a picture; its lengths are a third of these."""
_CACHES_AT_ONCE = 2
"""Caches that are simulated at the same time: each holds all shared nodes of a trace."""
WITHOUT_END = (1 << 64) - 1
"""Bytes of a cache that evicts nothing."""


def engines_of(trace: Trace, route: Route, number: int) -> NDArray[np.uint32]:
    """Return the number of the engine of each request.

    Args:
        trace: the requests.
        route: ``round-robin`` takes turns. ``session`` gives an engine all requests of a session, ``hash`` all with the
            same first node. ``turns`` gives it those that continue one of its prompts, and others in turn.
        number: of engines.

    Returns:
        uint32 of shape (n,).
    """
    found = np.arange(len(trace)) % number
    if route == "session" and trace.sessions is not None:
        found = trace.sessions % number
    elif route == "hash" and trace.paths is not None:
        nodes, _, offsets = trace.paths
        has_nodes = np.diff(offsets.astype(np.int64)) > 0
        first = np.zeros(len(trace), np.int64)
        first[has_nodes] = nodes[offsets[:-1][has_nodes].astype(np.int64)]
        found = np.unique(first, return_inverse=True)[1] % number
    elif route == "turns" and trace.paths is not None and number > 1:
        return turns(trace.paths.nodes, trace.paths.offsets, number)
    return found.astype(np.uint32)


def hits_of(
    trace: Trace, ranks: Sequence[Geometry], side: Side, engines: NDArray[np.uint32], pool: int = WITHOUT_END
) -> NDArray[np.int64]:
    """Return the leading tokens that engines have cached when each request comes.

    Args:
        trace: the requests.
        ranks: of one of the engines, which are alike.
        side: who fills the cache.
        engines: number of the engine of each request.
        pool: bytes of an engine's cache, of all its ranks.

    Returns:
        int64 of shape (rules, groups, n), with one rule at P; zeros if the trace has no identities.
    """
    groups = ranks[0].groups
    if trace.paths is None:
        return np.broadcast_to(np.int64(0), (2 if side == "decode" else 1, len(groups), len(trace)))
    # Equal groups have the same hits.
    block_bytes = dict.fromkeys(groups, 0)
    for rank in ranks:
        for layer in rank.layers:
            block_bytes[groups[layer.group]] += layer.block_stride
    answers = trace.answers if side != "prefill" else np.ones(len(trace))
    found = prefix_hits(
        *trace.paths,
        trace.prompts.astype(np.uint32),
        answers.astype(np.uint32),
        engines,
        ranks[0].core,
        [(groups.index(group), nbytes) for group, nbytes in block_bytes.items()],
        pool,
        side,
    )
    rows = {group: row for row, group in enumerate(block_bytes)}
    found = found.reshape(-1, len(rows), len(trace))
    return found[:, [rows[group] for group in groups]].astype(np.int64)


def _whole(group: Group) -> Group:
    return replace(group, kind="full", window=None, chunk=None) if group.window or group.chunk else group


def without_clipping(ranks: Sequence[Geometry]) -> list[Geometry]:
    """Return engines whose windows and chunks are full attention, to count whole prompts."""
    return [replace(rank, groups=tuple(map(_whole, rank.groups))) for rank in ranks]


def replay(
    trace: Trace,
    decode: Sequence[Geometry],
    prefill: Sequence[Geometry],
    *,
    engines: tuple[int, int] | None = None,
    speeds: tuple[float, float] | None = None,
    decode_speed: float | None = None,
    pools: tuple[int, int] = (WITHOUT_END, WITHOUT_END),
    route: Route = "turns",
    links: Mapping[str, Link],
    fixed_seconds: float = 0.0,
    on_step: Callable[[str], object] = lambda step: None,
    with_curves: bool = False,
) -> dict[str, Any]:
    """Replay a trace.

    Args:
        trace: the requests.
        decode: ranks of a decode engine.
        prefill: ranks of a prefill engine.
        engines: numbers of prefill and of decode engines; None for one of each, without policies.
        speeds: tokens that P and D compute in a second; None to leave out what needs them.
        decode_speed: tokens of all its answers that a D decodes in a second.
        pools: bytes of the cache of a prefill and of a decode engine.
        route: how requests find a decode engine, and a prefill engine.
        links: links to compare, by name.
        fixed_seconds: time of a hand-off besides its reads.
        on_step: called with the name of each step that begins.
        with_curves: whether to return `curves` too, arrays that a picture shows.

    Returns:
        Plain numbers: lengths in tokens, bytes, Gb/s, seconds and shares. docs/replay.md has the fields.
    """
    costs = cost(decode, prefill, fixed_seconds=fixed_seconds)
    at_p, at_d = (engines_of(trace, route, number) for number in engines or (1, 1))
    on_step("bytes of whole prompts")
    # Without a hit the length alone decides, and many requests have the same.
    lengths, which = np.unique(trace.prompts, return_inverse=True)

    def without_hits(of: HandOffCost, link: Link | None = None) -> Costs:
        return Costs._make(column[which] for column in of.of_each(lengths, link=link))

    whole = cost(without_clipping(decode), without_clipping(prefill))
    priced = {"whole": without_hits(whole), "clipped": without_hits(costs)}
    on_step("hits of caches")
    shared = trace
    if trace.paths is not None and WITHOUT_END in pools:
        shared = replace(trace, paths=trace.paths.shared())
    of_p, of_d = (shared if pool == WITHOUT_END else trace for pool in pools)
    wanted: dict[str, tuple[Trace, Sequence[Geometry], Side, NDArray[np.uint32], int]]
    wanted = {"d": (of_d, decode, "decode", at_d, pools[1])}
    if speeds is not None:
        wanted["p"] = (of_p, prefill, "prefill", at_p, pools[0])
    if speeds is not None and engines is not None:
        wanted["alone"] = (of_d, decode, "prefill", at_d, pools[1])  # a D that computes all
    with ThreadPoolExecutor(_CACHES_AT_ONCE) as threads:
        hits = dict(zip(wanted, threads.map(lambda each: hits_of(*each), wanted.values()), strict=True))
    if trace.paths is not None:
        rules = zip(("one_hit", "each_group"), hits["d"], strict=True)
        priced |= {name: costs.of_each(trace.prompts, of_groups) for name, of_groups in rules}
    span = float(trace.seconds[-1]) if len(trace) else 0.0
    found: dict[str, Any] = {
        "requests": len(trace),
        "seconds": span,
        "prompt_tokens": _lengths(trace.prompts),
        "answer_tokens": _lengths(trace.answers),
        "bytes": {name: int(each.bytes.sum()) for name, each in priced.items()},
        "gigabits_per_second": {name: _rates(trace.seconds, each.bytes) for name, each in priced.items()},
    }
    if with_curves:
        shown = {name: each.bytes for name, each in priced.items() if name != "one_hit"}
        found["curves"] = _over_time(trace, shown) | _by_length(trace.prompts, {"whole": whole, "clipped": costs})
    if span:
        found["decoded_tokens_per_second"] = float(trace.answers.sum()) / span
    if speeds is None:
        return found
    computed = trace.prompts / speeds[0]
    with_cache = (trace.prompts - hits["p"].min(axis=(0, 1))) / speeds[0]
    found["prefill"] = _busy(trace, {"": computed, "_with_cache": with_cache}, decode_speed)
    sent = priced["clipped"].bytes * 8e-9 / computed
    found["prefill"]["gigabits_per_second"] = {"median": float(np.median(sent)), "p99": float(np.percentile(sent, 99))}
    on_step("links")
    found["faster_on_d"] = {
        name: _faster(without_hits(costs, link), trace.prompts / speeds[1]) for name, link in links.items()
    }
    if engines is None:
        return found
    missing = trace.prompts - hits["d"][1].min(axis=0)
    alone = (trace.prompts - hits["alone"].min(axis=(0, 1))) / speeds[1]
    ways = Ways(trace.seconds, at_p, at_d, with_cache, missing, missing / speeds[1], alone, fixed_seconds)
    found["policies"] = {}
    for name, link in links.items():
        on_step(f"policies: {name}")
        reads = (
            without_hits(costs, link) if trace.paths is None else costs.of_each(trace.prompts, hits["d"][1], link=link)
        )
        found["policies"][name] = compare(ways, reads)
    return found


def _busy(trace: Trace, seconds: Mapping[str, NDArray[np.float64]], decode_speed: float | None) -> dict[str, Any]:
    """Return the seconds that P's compute, how many of them are busy, and how many each busy D needs."""
    found: dict[str, Any] = {}
    span, answers = float(trace.seconds[-1]), float(trace.answers.sum())
    for name, each in seconds.items():
        computed = float(each.sum())
        found[f"seconds{name}"] = computed
        if span:
            found[f"busy{name}"] = computed / span
        if decode_speed and answers:
            found[f"for_each_d{name}"] = computed / (answers / decode_speed)
    return found


def _lengths(tokens: NDArray[np.int64]) -> dict[str, float]:
    return {"median": float(np.median(tokens)), "mean": float(tokens.mean()), "p99": float(np.percentile(tokens, 99))}


def _rates(seconds: NDArray[np.float64], nbytes: NDArray[np.int64]) -> dict[str, float]:
    """Return the mean rate, and the rates that 99 % of the windows do not exceed. Each request moves as it arrives."""
    found = {}
    if span := float(seconds[-1]):
        found["mean"] = float(nbytes.sum()) * 8e-9 / span
    for window in _WINDOWS:
        sums = np.bincount((seconds // window).astype(np.int64), weights=nbytes)
        found[f"p99_of_{window}_s"] = float(np.percentile(sums, 99)) * 8e-9 / window
    return found


def _over_time(trace: Trace, nbytes: Mapping[str, NDArray[np.int64]]) -> dict[str, Any]:
    """Return the mean rates of windows of the same length. Arrivals on a grid are in the middle of a step."""
    grid = grid_of(trace.seconds)
    step, offset = grid or 1.0, (grid or 0.0) / 2
    shortest = float(trace.seconds[-1] + 2 * offset) / _POINTS
    window = next(window for power in count() for each in (1, 2, 5) if (window := step * each * 10**power) >= shortest)
    at = ((trace.seconds + offset) // window).astype(np.int64)
    return {
        "window": window,
        "seconds": (np.arange(at[-1] + 1) + 0.5) * window - offset,
        "gigabits_per_second": {name: np.bincount(at, weights=each) * 8e-9 / window for name, each in nbytes.items()},
    }


def _by_length(prompts: NDArray[np.int64], costs: Mapping[str, HandOffCost]) -> dict[str, Any]:
    """Return bytes for some lengths, and how dense the prompts are on a logarithmic scale between edges."""
    low, high = int(prompts.min()), max(int(prompts.max()) + 1, 2 * int(prompts.min()))
    tokens, edges = (np.unique(np.rint(np.geomspace(low, high, _POINTS // part)).astype(np.int64)) for part in (3, 5))
    return {
        "tokens": tokens,
        "bytes": {name: each.of_each(tokens).bytes for name, each in costs.items()},
        "edges": edges,
        "density": np.histogram(prompts, edges)[0] / np.diff(np.log2(edges)),
    }


def _faster(read: Costs, limit: NDArray[np.float64]) -> dict[str, float]:
    """Return the shares of requests that are read no faster than within a limit, the seconds of each."""
    return {
        "in_a_row": float((read.seconds >= limit).mean()),
        "scattered": float((read.most_seconds >= limit).mean()),
    }
