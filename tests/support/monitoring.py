# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts of examples/: their queries, and the metrics that these name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
DASHBOARD = EXAMPLES / "grafana/kvhma.json"
RULES = EXAMPLES / "prometheus/kvhma-alerts.yml"

_NAME = re.compile(r"(?<![\w:])(?:vllm:|vllm_router_)\w+")


def dashboard_queries() -> list[tuple[str, str]]:
    """Each query of the dashboard, with the title of its panel."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


def alert_queries() -> list[tuple[str, str]]:
    """The expression of each alert, with its name."""
    import yaml

    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def metrics_of(query: str) -> Iterator[str]:
    """The names of the time series of a query."""
    return (found[0] for found in _NAME.finditer(query))


def labels_of(query: str) -> set[str]:
    """The labels that a query selects or groups by."""
    found = {name for inner in re.findall(r"\bby \(([^)]*)\)", query) for name in inner.replace(" ", "").split(",")}
    return found | set(re.findall(r"(\w+)(?:=~|!=|!~|=)\"", query))
