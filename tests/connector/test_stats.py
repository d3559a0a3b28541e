# SPDX-License-Identifier: Apache-2.0
"""Metrics: how numbers of threads, ranks and intervals are combined, and that each metric is documented."""

import json
import re
import threading
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvhma.vllm import KvhmaConnector, drop_in
from kvhma.vllm.telemetry import stats
from kvhma.vllm.telemetry.stats import METRICS, PromMetrics, StatsCollector, TransferStats
from support.cache.engine import vllm_config_of
from support.leases import Clock

DOCS = Path(__file__).parents[2] / "docs" / "vllm-metrics.md"


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(stats, "time", made)
    return made


def sent(taken):
    """As vLLM sends them to another process."""
    return json.loads(json.dumps(taken.to_dict()))


@pytest.fixture
def prom():
    """Prometheus' metrics of two engines, as vLLM makes them."""
    known = set(REGISTRY._collector_to_names)
    labels = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    made = KVConnectorProm(vllm_config_of("p", True, "kv_both"), ["model_name", "engine"], labels)
    assert isinstance(made.prom_metrics, PromMetrics)
    yield made
    for collector in set(REGISTRY._collector_to_names) - known:
        REGISTRY.unregister(collector)


def sample(name, engine=0, **labels):
    return REGISTRY.get_sample_value(f"vllm:kvhma_{name}", {"model_name": "tiny", "engine": str(engine), **labels})


def test_a_gauge_that_comes_back_to_0_says_so(clock, prom):
    gauges, held = {"held_leases": 0, "pinned_blocks": 0}, []
    collector = StatsCollector(lambda: gauges, busy=held)
    assert collector.take() is None, "nothing has been kept yet"
    gauges |= {"held_leases": 2, "pinned_blocks": 40}
    held += ["a", "b"]
    assert collector.take() is None, "it may be over in a moment"
    clock.now += 1
    prom.observe(sent(collector.take()))
    assert (sample("held_leases"), sample("pinned_blocks")) == (2, 40)
    assert (sample("held_leases", engine=1), sample("loads_in_flight")) == (0, 0)
    clock.now += 0.01
    gauges |= {"held_leases": 0, "pinned_blocks": 0}
    held.clear()
    taken = collector.take()
    assert taken is not None
    assert not taken.is_empty()
    prom.observe(sent(taken))
    assert (sample("held_leases"), sample("pinned_blocks")) == (0, 0)
    assert collector.take() is None


def test_the_slowest_rank_counts(prom):
    """The ranks of an engine load the same requests."""
    ranks = []
    for seconds in (2.0, 7.0, 0.0):
        rank = TransferStats()
        rank.gauge("loads_in_flight", int(seconds > 0))
        rank.gauge("oldest_load_seconds", seconds)
        ranks.append(rank)
    silent = TransferStats()
    scheduler = TransferStats()
    scheduler.gauge("held_leases", 3)
    joined = silent.aggregate(ranks[0]).aggregate(ranks[1]).aggregate(ranks[2]).aggregate(scheduler)
    prom.observe(sent(joined))
    assert [sample(name) for name in ("loads_in_flight", "oldest_load_seconds", "held_leases")] == [1, 7, 3]
    prom.observe(sent(ranks[0]))
    assert (sample("oldest_load_seconds"), sample("held_leases")) == (2, 3), "an unreported gauge stays unchanged"


def test_threads_count_together():
    collector = StatsCollector()

    def count():
        for _ in range(2000):
            collector.count("handshakes")
            collector.count("side_channel_refused", label="idle")
            collector.record(handshake_seconds=0.1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    taken = [one for _ in range(50) if (one := collector.take()) is not None]
    for thread in threads:
        thread.join()
    total = TransferStats()
    for one in [*taken, collector.take() or TransferStats()]:
        total.aggregate(one)
    assert (total.data["handshakes"], total.data["side_channel_refused"]) == (8000, {"idle": 8000})
    assert len(total.data["handshake_seconds"]) == 8000
    assert "held_leases" not in total.data


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_documented_by_its_name_and_kind(name, prom):
    metric = METRICS[name]
    made = prom.prom_metrics._metrics[name]
    kind = Histogram if metric.buckets else Gauge if metric.gauge else Counter
    assert isinstance(made if metric.label else made[0], kind)
    (table,) = re.findall(r"^\| metric \| \|\n(.*?)\n\n", DOCS.read_text(encoding="utf-8"), re.M | re.S)
    documented = {}
    for row in table.splitlines():
        names, text = (cell.strip() for cell in row.strip("|").split("|")[:2])
        for found in re.findall(r"`([\w:]+)`", names):
            documented[found.removeprefix("vllm:kvhma_").lstrip("_")] = text
    # Prometheus adds `_total` to the name of a counter.
    full = name if metric.buckets or metric.gauge else f"{name}_total"
    assert full in documented
    if metric.label:
        assert f"by `{metric.label}`" in documented[full], "its label"


def test_no_metric_is_documented_that_there_is_not():
    found = re.findall(
        r"`(?:vllm:kvhma)?_?([a-z_]+?)(?:_total)?`",
        "".join(re.findall(r"^\| `vllm:kvhma.*?\|", DOCS.read_text(), re.M)),
    )
    assert set(found) == set(METRICS)


@pytest.mark.parametrize("connector", [KvhmaConnector, drop_in.NixlConnector])
def test_a_child_of_multi_connector_is_found_by_its_name(connector):
    # What MultiConnector calls a child's statistics, as they come from the engine's process.
    name = connector.__name__
    found = MultiConnector.build_kv_connector_stats({name: TransferStats().data})
    assert type(found.data[name]) is TransferStats
