# SPDX-License-Identifier: Apache-2.0
"""Metrics of reported reads."""

from __future__ import annotations

import logging

from kvhma._kvhma import Transfer, first_entries
from kvhma.vllm.metadata import ReadCommand
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.reads.active_read import ActiveRead
from kvhma.vllm.telemetry.stats import StatsCollector

logger = logging.getLogger("vllm.kvhma")


class ReadMetrics:
    """Measures reads after they were reported. The pump's thread does so, while the engine continues.

    Attributes:
        block_bytes: bytes of a block of each group, over the group's layers on this rank.
    """

    def __init__(self, context: WorkerContext, stats: StatsCollector) -> None:
        """Start without reads."""
        self._geometry = context.geometry
        self._rank = str(context.rank)
        """The label under which transfers are counted."""
        self._stats = stats
        self._on_read_reported = context.rooms.on_read_reported
        self._group_labels = [f"{index} {group.kind}" for index, group in enumerate(context.geometry.groups)]
        self.block_bytes = [0] * len(self._group_labels)
        for layer in context.geometry.layers:
            self.block_bytes[layer.group] += layer.page.nbytes * context.geometry.groups[layer.group].ratio

    def measure(self, read: ActiveRead) -> None:
        """Measure a read that was reported."""
        for on_read_reported in self._on_read_reported:
            on_read_reported(read)
        if read.error is None and read.transfer is not None:
            self._count(read, read.transfer)

    def _count(self, read: ActiveRead, transfer: Transfer) -> None:
        command = read.command
        transfer_seconds = read.read_at - read.posted_at + read.post_seconds
        clipped = [
            max(0, span.first * group.block_size - command.cached)
            for group, span in zip(self._geometry.groups, command.spans, strict=True)
            if group.kind in ("sliding", "chunked")
        ]
        counted = [part.handle.telemetry for part in read.parts if part.handle is not None]
        posted = [telemetry.descriptors for telemetry in counted if telemetry is not None]
        moved: dict[str, float] = {
            "zeroed_bytes": int(transfer.zero[:, 1].sum()),
            "permuted_bytes": 0 if read.permutes is None else int(read.permutes[:, 2:].prod(axis=1).sum()),
        }
        by_rank: dict[str, float] = {
            "rank_bytes": transfer.bytes,
            "rank_descriptors": transfer.descriptors,
            "rank_seconds": transfer_seconds,
        }
        by_group = {"group_bytes": transfer.bytes_by_group, "group_descriptors": transfer.descriptors_by_group}
        series: dict[str, float] = {}
        if command.piece:  # the last piece is counted as the load
            moved |= {"pieces": 1, "piece_bytes": transfer.bytes}
        else:
            hits = self._hits(command)
            by_group["group_cached_tokens"] = [
                hit * group.tokens_per_entry for hit, group in zip(hits, self._geometry.groups, strict=True)
            ]
            by_group["group_cached_bytes"] = [hit * nbytes for hit, nbytes in zip(hits, self.block_bytes, strict=True)]
            moved |= {
                "tokens_loaded": command.num_tokens - command.cached,
                "tokens_cached": command.cached,
                "tokens_clipped": sum(clipped),
            }
            series = {
                "load_seconds": read.ended_at - read.ordered_at,
                "post_seconds": read.post_seconds,
                "transfer_seconds": transfer_seconds,
                "bytes": transfer.bytes,
                "selected_descriptors": sum(len(part.local) for part in read.parts),
            }
            if len(posted) == len(counted):  # NIXL's environment may disable its telemetry
                series["posted_descriptors"] = sum(posted)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("kvhma: loaded %s from %s: %s", command.request_id, command.remote.engine_id, series | moved)
        with self._stats.together() as stats:
            stats.record(**series)
            if not command.piece:
                stats.count("lease_checks", label="board" if read.verified_by_board else "question")
            for name, number in moved.items():
                stats.count(name, number)
            for name, number in by_rank.items():
                stats.count(name, number, label=self._rank)
            for name, numbers in by_group.items():
                for label, of_group in zip(self._group_labels, numbers, strict=True):
                    stats.count(name, of_group, label=label)

    def _hits(self, command: ReadCommand) -> list[int]:
        """Return for each group how many entries D had in its prefix cache, of those that the next token needs."""
        spans = command.held or command.spans
        firsts = first_entries(self._geometry.core, command.num_tokens, [0] * len(spans))
        needed = zip(spans, firsts, self._geometry.groups, strict=True)
        return [0 if group.kind == "ssm" else max(0, span.first - first) for span, first, group in needed]
