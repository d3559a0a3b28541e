# SPDX-License-Identifier: Apache-2.0
"""Every metric that the dashboard and the alerts name is a metric of the connector, with those labels."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml")

from kvhma.vllm.telemetry.stats import METRICS
from support.monitoring import alert_queries, dashboard_queries, labels_of, metrics_of

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
"""VLLM's own, by `source`: `e2e/test_look_at_it.py` sees that engines have it."""
OF_ALL = {"instance", "job", "model_name", "engine", "le"}


def names(metric: str) -> set[str]:
    """The time series of a metric, as Prometheus names them."""
    if METRICS[metric].buckets:
        return {f"vllm:kvhma_{metric}{suffix}" for suffix in ("_bucket", "_sum", "_count")}
    return {f"vllm:kvhma_{metric}" + ("" if METRICS[metric].gauge else "_total")}


# tests/unit/test_router.py compares the router's metrics with the router's own.
OF_ENGINES = [asked for asked in (*dashboard_queries(), *alert_queries()) if "vllm_router_" not in asked[1]]


@pytest.mark.parametrize(("place", "query"), OF_ENGINES)
def test_metrics_and_labels_exist(place: str, query: str) -> None:
    known = {name: metric for metric in METRICS for name in names(metric)}
    used = set(metrics_of(query))
    assert used <= {*known, BY_SOURCE}, place
    labels = {"source" if name == BY_SOURCE else METRICS[known[name]].label for name in used}
    assert labels_of(query) <= OF_ALL | labels, place
