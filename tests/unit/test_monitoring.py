# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts: checked by Prometheus' own tool and Grafana's own classes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

from kvhma.cli.serve_pair import _scrapes
from support.monitoring import DASHBOARD, EXAMPLES, alert_queries

ROOT = EXAMPLES.parent
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")


def promtool(*arguments: str) -> str:
    ended = subprocess.run(
        [str(PROMTOOL), *arguments], cwd=EXAMPLES / "prometheus", capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@needs_promtool
def test_prometheus_takes_the_files() -> None:
    assert f"{len(alert_queries())} rules found" in promtool("check", "rules", "kvhma-alerts.yml")
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_prometheus_takes_what_serve_pair_writes(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(_scrapes({"prefill": 1, "decode": 2, "router": 3}))
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


@needs_promtool
def test_every_alert_fires_when_it_should() -> None:
    promtool("test", "rules", "kvhma-alerts.test.yml")
    tested = set(re.findall(r'alertname="(\w+)"', (EXAMPLES / "prometheus/kvhma-alerts.test.yml").read_text()))
    assert tested == {name for name, _ in alert_queries()}


def test_grafana_knows_every_field() -> None:
    """Grafana's classes read the dashboard and write the same again: they would lose an unknown field."""
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason="make dev installs it")
    from grafana_foundation_sdk.models.dashboard import Dashboard

    form = json.loads(DASHBOARD.read_text())
    written = json.loads(json.dumps(Dashboard.from_json(form), cls=encoder.JSONEncoder))
    assert contained(form, written) == []


def contained(part: Any, whole: Any, place: str = "") -> list[str]:
    """Return the places where a value differs from another."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return [
            wrong
            for key, value in part.items()
            for wrong in (contained(value, whole[key], f"{place}/{key}") if key in whole else [f"{place}/{key}"])
        ]
    if isinstance(part, list) and isinstance(whole, list) and len(part) == len(whole):
        pairs = enumerate(zip(part, whole, strict=True))
        return [wrong for index, pair in pairs for wrong in contained(*pair, f"{place}/{index}")]
    return [] if part == whole else [place]
