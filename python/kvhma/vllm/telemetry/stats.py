# SPDX-License-Identifier: Apache-2.0
"""What the connector measures, for vLLM's log line and for Prometheus (``vllm:kvhma_*``)."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_GAUGE_SECONDS = 1.0
"""How often gauges other than 0 are reported."""


class Metric(NamedTuple):
    """One metric: a histogram if it has buckets, a gauge, or else a counter; by the values of a label if it has one."""

    text: str
    buckets: list[float] | None = None
    label: str | None = None
    gauge: bool = False


METRICS = {
    "load_seconds": Metric(
        "Time from when the scheduler ordered a load to its end, in seconds.", [2**k * 1e-4 for k in range(18)]
    ),
    "post_seconds": Metric("Time to hand a load to the transport, in seconds.", [2**k * 1e-5 for k in range(18)]),
    "transfer_seconds": Metric(
        "Time from the post of a load to its end, in seconds.", [2**k * 1e-4 for k in range(18)]
    ),
    "bytes": Metric("Bytes of a load.", [4.0**k * 1024 for k in range(13)]),
    "selected_descriptors": Metric("Descriptors that a load was planned with.", [4.0**k for k in range(10)]),
    "posted_descriptors": Metric("Descriptors that went to the transport.", [4.0**k for k in range(10)]),
    "handshake_seconds": Metric(
        "Time of a handshake with another engine, in seconds.", [2**k * 1e-3 for k in range(14)]
    ),
    "pieces": Metric("Pieces of loads that were read while their prompt was computed."),
    "piece_bytes": Metric("Bytes of these pieces. The bytes of such a load are those of its last piece."),
    "lost_pieces": Metric("Pieces that could not be read; what they held was read at the end."),
    "followed": Metric("Requests with a ticket, by what became of them.", label="end"),
    "tokens_loaded": Metric("Tokens whose cache was loaded."),
    "tokens_cached": Metric("Tokens of loads that were cached already and not moved."),
    "tokens_clipped": Metric("Tokens of loads before every window or chunk of a group, summed over such groups."),
    "copied_bytes": Metric("Bytes that were copied from the mapped memory of an engine of this host, without NIXL."),
    "permuted_bytes": Metric("Bytes that were read in the order of P's blocks and reordered afterwards."),
    "zeroed_bytes": Metric("Bytes zeroed after the tokens of loads."),
    "zero_seconds": Metric(
        "Time until a device has done the earlier steps and zeroed what a load does not cover, in seconds.",
        [2**k * 1e-5 for k in range(18)],
    ),
    "delayed_posts": Metric("Loads that were posted late, because the device was still zeroing or at an earlier step."),
    "handshakes": Metric("Handshakes with other engines."),
    "abandoned_leases": Metric(
        "Leases that are neither renewed nor released any more, because too many other engines have leases."
    ),
    "idle_engines": Metric("Engines that were evicted, because nothing had been read from them for long."),
    "expired": Metric("Leases that ended before a reader had read the blocks.", label="reason"),
    "held_dropped": Metric("Finished requests whose blocks were evicted unread, because newer ones needed the room."),
    "staging_full": Metric("Finished prompts that were not offered to D, because staging_blocks had no room for them."),
    "digest_refused": Metric("Claims and releases whose parameters are not those that P handed out."),
    "held_leases": Metric("Finished requests whose blocks are held for other engines.", gauge=True),
    "pinned_blocks": Metric("Blocks that are held for other engines.", gauge=True),
    "oldest_unread_seconds": Metric(
        "Time since the end of the oldest request that is held and that no reader has claimed or read.", gauge=True
    ),
    "held_answers": Metric("Answers among them, held for the next turns of their conversations.", gauge=True),
    "answers": Metric("Answers that were held for a next turn, by what became of them.", label="end"),
    "loads_in_flight": Metric("Loads that have not ended.", gauge=True),
    "oldest_load_seconds": Metric("Time since the oldest load that has not ended was ordered.", gauge=True),
    "resumed_loads": Metric("Times that a load continued after it had lost parts with a connection to P."),
    "reread_bytes": Metric("Bytes of these parts, which were read again."),
    "lease_checks": Metric("Loads that succeeded, by what confirmed that P held their blocks.", label="by"),
    "slow_loads": Metric("Loads that took longer than their lease. P held the blocks all the same, if it answered."),
    "stalls": Metric("Times that a process, or its machine, stalled."),
    "thread_restarts": Metric("Threads of the connector that crashed and were restarted.", label="thread"),
    "refused_sources": Metric(
        "Requests whose parameters name an engine that they may not be loaded from.", label="reason"
    ),
    "side_channel_refused": Metric(
        "Connections that the side channel refused or cut off, and its own errors.", label="reason"
    ),
    "refused_engines": Metric("Handshakes that were refused because max_peers other engines were busy."),
    "dropped_notifications": Metric("Notifications of NIXL that kvhma never sends, and that were dropped."),
    "group_bytes": Metric("Bytes moved for a group.", label="group"),
    "group_descriptors": Metric(
        "Descriptors of a group. A descriptor that spans two groups counts for the group of its first byte.",
        label="group",
    ),
    "group_cached_tokens": Metric("Tokens of a group that a load needed and D had cached already.", label="group"),
    "group_cached_bytes": Metric("Bytes of these tokens, which were not read.", label="group"),
    "rank_bytes": Metric("Bytes moved by a rank: more than its share where ranks repeat heads.", label="rank"),
    "rank_descriptors": Metric("Descriptors that a rank's loads were planned with.", label="rank"),
    "rank_seconds": Metric(
        "Time of a rank's transfers. A request continues when the slowest rank is done.", label="rank"
    ),
    "failed_loads": Metric("Loads that failed.", label="cause"),
    "content_digests": Metric("Loads whose content was compared with what P holds.", label="result"),
    "digest_tokens": Metric("Tokens of loads that were compared, summed over the kinds of layers."),
    "digest_seconds": Metric(
        "Time to sum what the blocks of a request hold, in seconds.", [2**k * 1e-5 for k in range(18)]
    ),
    "local_prefills": Metric(
        "Prompts with parameters of a prefill engine that fell back to local prefill.", label="reason"
    ),
}
"""Every metric by name. A group is named by its index and kind, ``"0 full"``; causes are those of
:class:`kvhma.vllm.failures.Failure`; docs/troubleshooting.md explains the reasons."""


@dataclass
class TransferStats(KVConnectorStats):
    """Numbers of one interval. `data` has only what was counted; it can be pickled and sent as JSON.

    Ranks and intervals are joined by appending and adding. Of a gauge the highest value counts: for the ranks of one
    step it is the slowest rank's.

    Attributes:
        data: by the metric's name: a list for a histogram, a dictionary by label, or a number.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Clear all numbers."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted. A gauge that is back at 0 counts, because it was not 0 before."""
        return not self.data

    def count(self, name: str, number: float = 1, *, label: str | None = None) -> None:
        """Add to a counter."""
        numbers, key = (self.data, name) if label is None else (self.data.setdefault(name, {}), label)
        numbers[key] = numbers.get(key, 0) + number

    def record(self, **values: float) -> None:
        """Append to histograms."""
        for name, value in values.items():
            self.data.setdefault(name, []).append(value)

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        self.data[name] = value

    def aggregate(self, more: KVConnectorStats) -> TransferStats:
        """Add the numbers of another rank or interval."""
        for name, value in more.data.items():
            if name not in self.data:
                # A copy, because this list grows.
                self.data[name] = value.copy() if isinstance(value, dict | list) else value
            elif METRICS[name].gauge:
                self.data[name] = max(self.data[name], value)
            elif isinstance(value, dict):
                for label, number in value.items():
                    self.count(name, number, label=label)
            else:
                self.data[name] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what the log line shows."""
        data = self.data
        loads = len(data.get("load_seconds", ()))
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
            }
        if posted := data.get("posted_descriptors"):
            line["Avg descriptors posted"] = round(statistics.fmean(posted), 1)
        ranks = data.get("rank_bytes", {})
        if len(ranks) > 1:
            for rank, nbytes in sorted(ranks.items()):
                line[f"Rank {rank} MB"] = round(nbytes / 1e6, 3)
                line[f"Rank {rank} transfer (ms)"] = round(data["rank_seconds"][rank] * 1e3, 2)
        for name, metric in METRICS.items():
            text = name.replace("_", " ").capitalize()
            if metric.label in ("cause", "reason", "thread"):
                line |= {f"{text} ({label})": number for label, number in data.get(name, {}).items()}
            elif not metric.buckets and not metric.label and data.get(name):
                line[text] = round(data[name], 1)
        return line


class StatsCollector:
    """What one process counts until vLLM takes it. Safe to use from several threads."""

    def __init__(self, gauges: Callable[[], Mapping[str, float]] = dict, *, busy: Collection[Any] = ()) -> None:
        """Start with nothing.

        Args:
            gauges: returns the gauges of this process.
            busy: not empty while any gauge may differ from 0. vLLM takes the stats in every step, so the look has to be
                cheap.
        """
        self._gauges = gauges
        self._busy = busy
        self._lock = threading.Lock()
        self._stats = TransferStats()
        self._report_at: float | None = None
        """When gauges are reported next; None while all are 0."""
        self._reported = False
        """Whether the last reported gauges were not all 0."""

    def count(self, name: str, number: float = 1, *, label: str | None = None) -> None:
        """Add to a counter."""
        with self._lock:
            self._stats.count(name, number, label=label)

    def record(self, **values: float) -> None:
        """Append to histograms."""
        with self._lock:
            self._stats.record(**values)

    @contextlib.contextmanager
    def together(self) -> Iterator[TransferStats]:
        """Count several numbers that vLLM takes together."""
        with self._lock:
            yield self._stats

    def take(self) -> TransferStats | None:
        """Return what was counted since the last call; None if nothing was.

        It includes the gauges once a second while any of them is not 0, and once more when all are 0 again. Shorter
        peaks are left out: P holds most requests for some milliseconds.
        """
        if (self._busy or self._report_at is not None) and self._is_time_to_report():
            values = self._gauges()
            with self._lock:
                for name, value in values.items():
                    self._stats.gauge(name, value)
        if not self._stats.data:  # a number that is counted right now is in the next call's
            return None
        with self._lock:
            stats, self._stats = self._stats, TransferStats()
        return stats

    def _is_time_to_report(self) -> bool:
        if not self._busy:
            reported, self._reported, self._report_at = self._reported, False, None
            return reported
        now = time.monotonic()
        if self._report_at is not None and now < self._report_at:
            return False
        self._reported = self._report_at is not None
        self._report_at = now + _GAUGE_SECONDS
        return self._reported


class PromMetrics(KVConnectorPromMetrics):
    """The numbers as Prometheus metrics, labelled as vLLM's own."""

    def __init__(self, *args: Any) -> None:
        """Register the metrics."""
        super().__init__(*args)
        self._metrics: dict[str, Any] = {name: self._register(name, metric) for name, metric in METRICS.items()}

    def _register(self, name: str, metric: Metric) -> Any:
        """Return a metric for each engine. A metric with a label has its engine set when it is observed."""
        # vLLM's types allow a histogram where a counter is meant, and the other way round.
        make: Any = self._histogram_cls if metric.buckets else self._gauge_cls if metric.gauge else self._counter_cls
        more: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
        if metric.gauge:
            # Any front end may get the value; the latest value counts.
            more["multiprocess_mode"] = "mostrecent"
        labels = [*self._labelnames, metric.label] if metric.label else self._labelnames
        made = make(name=f"vllm:kvhma_{name}", documentation=metric.text, labelnames=labels, **more)
        if metric.label:
            return made
        return {index: made.labels(*values) for index, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the numbers of one interval."""
        for name, value in transfer_stats_data.items():
            self._observe_metric(self._metrics[name], METRICS[name], value, engine_idx)

    def _observe_metric(self, registered: Any, metric: Metric, value: Any, engine_idx: int) -> None:
        if metric.gauge:
            registered[engine_idx].set(value)
        elif isinstance(value, dict):
            for label, number in value.items():
                registered.labels(*self.per_engine_labelvalues[engine_idx], label).inc(number)
        elif isinstance(value, list):
            for sample in value:
                registered[engine_idx].observe(sample)
        else:
            registered[engine_idx].inc(value)
