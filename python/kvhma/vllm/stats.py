# SPDX-License-Identifier: Apache-2.0
"""What the connector measures: for vLLM's log line and for Prometheus (``vllm:kvhma_*``)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

SERIES = (
    "load_seconds",
    "post_seconds",
    "transfer_seconds",
    "bytes",
    "selected_descriptors",
    "posted_descriptors",
    "zeroed_bytes",
    "tokens_loaded",
    "tokens_cached",
    "tokens_clipped",
)
"""One number for each load of each rank."""

CAUSES = ("refused", "handshake", "unsupported", "request", "transfer", "peer_lost", "expired", "internal")
"""Why loads fail, see :class:`kvhma.vllm.metadata.Failure`."""

REASONS = ("other_prompt", "late_sibling", "no_room", "state_ahead")
"""Why D computes a prompt itself although it was given parameters: they are of another prompt, P let go of the blocks
after other samples of the prompt had read them, D had no room while it kept blocks for others, or P's states or windows
are those of more tokens than D can take over."""

COUNTS = (
    "handshakes",
    "late_checks",
    "expired",
    *(f"failed_{cause}" for cause in CAUSES),
    *(f"computed_{reason}" for reason in REASONS),
)
"""Sums. ``expired`` counts leases of P that ended unread, ``failed_expired`` loads of D that came too late."""


def _empty() -> dict[str, Any]:
    sums: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    return {name: [] for name in SERIES} | sums | {"handshake_seconds": [], "groups": {}, "ranks": {}}


@dataclass
class TransferStats(KVConnectorStats):
    """Numbers of one interval. `data` can be pickled and sent as JSON; ranks are joined by appending.

    ``data["groups"]`` maps ``"0 full"`` (index and kind of a group) to bytes and descriptors of all its loads,
    ``data["ranks"]`` the rank of a worker to bytes, descriptors and seconds of all its loads.
    """

    data: dict[str, Any] = field(default_factory=_empty)

    def reset(self) -> None:
        """Forget everything."""
        self.data = _empty()

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def count(self, name: str, number: int = 1) -> None:
        """Add to one of `COUNTS`."""
        self.data[name] += number

    def record(self, **values: float) -> None:
        """Append to some of `SERIES`."""
        for name, value in values.items():
            self.data[name].append(value)

    def add(self, table: str, name: str, **values: float) -> None:
        """Add to a row of ``groups`` or ``ranks``."""
        row = self.data[table].setdefault(name, dict.fromkeys(values, 0))
        for key, value in values.items():
            row[key] += value

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add the numbers of another rank or interval."""
        for name, value in other.data.items():
            if isinstance(value, dict):
                for row, numbers in value.items():
                    self.add(name, row, **numbers)
            elif isinstance(value, list):
                self.data[name] = self.data[name] + value
            else:
                self.data[name] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what the log line shows."""
        data = self.data
        loads = len(data["load_seconds"])
        line: dict[str, int | float] = {"Loads": loads}
        if loads:
            times = sorted(data["load_seconds"])
            seconds, nbytes = sum(data["transfer_seconds"]), sum(data["bytes"])
            line |= {
                "Avg load (ms)": round(statistics.fmean(times) * 1e3, 2),
                "P90 load (ms)": round(times[(9 * loads - 1) // 10] * 1e3, 2),
                "Avg post (ms)": round(statistics.fmean(data["post_seconds"]) * 1e3, 2),
                "Avg MB": round(nbytes / loads / 1e6, 3),
                "Throughput (MB/s)": round(nbytes / seconds / 1e6, 1) if seconds else 0.0,
                "Avg descriptors": round(statistics.fmean(data["selected_descriptors"]), 1),
                "Avg descriptors posted": round(statistics.fmean(data["posted_descriptors"]), 1),
                "Tokens loaded": int(sum(data["tokens_loaded"])),
                "Tokens cached": int(sum(data["tokens_cached"])),
            }
            if len(data["ranks"]) > 1:
                for rank, row in sorted(data["ranks"].items()):
                    line[f"Rank {rank} MB"] = round(row["bytes"] / 1e6, 3)
                    line[f"Rank {rank} transfer (ms)"] = round(row["seconds"] * 1e3, 2)
        for name in COUNTS:
            if data[name]:
                line[name.replace("_", " ").capitalize()] = data[name]
        return line


_HISTOGRAMS: dict[str, tuple[str, list[float]]] = {
    "load_seconds": (
        "Time from the scheduler's order to the end of a load, in seconds.",
        [2**k * 1e-4 for k in range(18)],
    ),
    "post_seconds": ("Time to hand a load to the transport, in seconds.", [2**k * 1e-5 for k in range(18)]),
    "transfer_seconds": ("Time from the post of a load to its end, in seconds.", [2**k * 1e-4 for k in range(18)]),
    "bytes": ("Bytes of a load.", [4.0**k * 1024 for k in range(13)]),
    "selected_descriptors": ("Descriptors that a load was planned with.", [4.0**k for k in range(10)]),
    "posted_descriptors": ("Descriptors that went to the transport.", [4.0**k for k in range(10)]),
    "handshake_seconds": ("Time of a handshake with another engine, in seconds.", [2**k * 1e-3 for k in range(14)]),
}
_COUNTERS = {
    "tokens_loaded": "Tokens whose cache was loaded.",
    "tokens_cached": "Tokens of loads that were cached already and not moved.",
    "tokens_clipped": "Tokens of loads that lie before every window or chunk of a group, summed over such groups.",
    "zeroed_bytes": "Bytes zeroed behind the tokens of loads.",
    "handshakes": "Handshakes with other engines.",
    "late_checks": "Loads that ended close to the end of their lease and were checked with the other engine.",
    "expired": "Leases that ended before anybody read the blocks.",
}


_RANK_COUNTERS = {
    "bytes": "Bytes moved by a rank: more than its share where ranks repeat heads.",
    "descriptors": "Descriptors that a rank's loads were planned with.",
    "seconds": "Time of a rank's transfers: the slowest one decides when a request goes on.",
}


class PromMetrics(KVConnectorPromMetrics):
    """The numbers as Prometheus metrics, labelled as vLLM's own."""

    def __init__(self, *args: Any) -> None:
        """Register them."""
        super().__init__(*args)
        self._histograms = {
            name: self._per_engine(
                self._histogram_cls(
                    name=f"vllm:kvhma_{name}", documentation=text, buckets=buckets, labelnames=self._labelnames
                )
            )
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: self._per_engine(
                self._counter_cls(name=f"vllm:kvhma_{name}", documentation=text, labelnames=self._labelnames)
            )
            for name, text in _COUNTERS.items()
        }
        by_group = [*self._labelnames, "group"]
        self._group_bytes = self._counter_cls(
            name="vllm:kvhma_group_bytes", documentation="Bytes moved for a group.", labelnames=by_group
        )
        self._group_descriptors = self._counter_cls(
            name="vllm:kvhma_group_descriptors",
            documentation="Descriptors of a group, before neighbours of other groups are joined.",
            labelnames=by_group,
        )
        by_rank = [*self._labelnames, "rank"]
        self._ranks = {
            name: self._counter_cls(name=f"vllm:kvhma_rank_{name}", documentation=text, labelnames=by_rank)
            for name, text in _RANK_COUNTERS.items()
        }
        self._failures = self._counter_cls(
            name="vllm:kvhma_failed_loads", documentation="Loads that failed.", labelnames=[*self._labelnames, "cause"]
        )

        self._computed = self._counter_cls(
            name="vllm:kvhma_computed_prompts",
            documentation="Prompts with parameters of a prefill engine that were computed here all the same.",
            labelnames=[*self._labelnames, "reason"],
        )

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {index: metric.labels(*values) for index, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the numbers of one interval."""
        for name, metrics in self._histograms.items():
            for value in transfer_stats_data[name]:
                metrics[engine_idx].observe(value)
        for name, metrics in self._counters.items():
            value = transfer_stats_data[name]
            metrics[engine_idx].inc(sum(value) if isinstance(value, list) else value)
        labels = self.per_engine_labelvalues[engine_idx]
        for group, row in transfer_stats_data["groups"].items():
            self._group_bytes.labels(*labels, group).inc(row["bytes"])
            self._group_descriptors.labels(*labels, group).inc(row["descriptors"])
        for rank, row in transfer_stats_data["ranks"].items():
            for name, counter in self._ranks.items():
                counter.labels(*labels, rank).inc(row[name])
        for cause in CAUSES:
            if transfer_stats_data[f"failed_{cause}"]:
                self._failures.labels(*labels, cause).inc(transfer_stats_data[f"failed_{cause}"])
        for reason in REASONS:
            if transfer_stats_data[f"computed_{reason}"]:
                self._computed.labels(*labels, reason).inc(transfer_stats_data[f"computed_{reason}"])
