# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts: checked by Prometheus' own tool and Grafana's own classes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

from kvhma.cli.serve_pair import _scrapes
from support.monitoring import DASHBOARD, EXAMPLES, alert_queries, dashboard_queries, metrics_of

ROOT = EXAMPLES.parent
COMPOSE = EXAMPLES / "grafana/compose.yaml"
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


def test_the_dashboard_of_compose() -> None:
    """What it mounts is there, Grafana asks that Prometheus, and looks for the dashboard where it is mounted."""
    form = yaml.safe_load(
        re.sub(r"\$\{PROMETHEUS_CONFIG:\?[^}]*\}", "../prometheus/prometheus.yml", COMPOSE.read_text())
    )
    prometheus, grafana = form["services"]["prometheus"], form["services"]["grafana"]
    mounts = {
        name: {Path(mount["target"]): (COMPOSE.parent / mount["source"]).resolve() for mount in service["volumes"]}
        for name, service in form["services"].items()
    }
    at = Path("/etc/prometheus")
    for name in ("prometheus.yml", "kvhma-alerts.yml"):
        assert mounts["prometheus"][at / name] == EXAMPLES / "prometheus" / name
    rules = yaml.safe_load((EXAMPLES / "prometheus/prometheus.yml").read_text())["rule_files"]
    assert rules == [(at / "kvhma-alerts.yml").name]
    listens = dict(word.removeprefix("--").split("=") for word in prometheus["command"])
    assert listens["config.file"] == str(at / "prometheus.yml")
    given = {
        Path(one["target"]).parent.name: yaml.safe_load(form["configs"][one["source"]]["content"])
        for one in grafana["configs"]
    }
    assert {Path(one["target"]).parents[1] for one in grafana["configs"]} == {Path("/etc/grafana/provisioning")}
    (source,) = given["datasources"]["datasources"]
    assert source["url"] == f"http://{listens['web.listen-address']}"
    (wanted,) = (
        one["query"] for one in json.loads(DASHBOARD.read_text())["templating"]["list"] if one["name"] == "source"
    )
    assert source["type"] == wanted
    ((dashboard, file),) = mounts["grafana"].items()
    assert file == DASHBOARD
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == str(dashboard)
    (provider,) = given["dashboards"]["providers"]
    assert provider["options"]["path"] == str(dashboard.parent)
    assert all(service["network_mode"] == "host" for service in form["services"].values())
    for address in (listens["web.listen-address"], grafana["environment"]["GF_SERVER_HTTP_ADDR"]):
        assert address.startswith("127.0.0.1")


@needs_promtool
def test_every_alert_fires_when_it_should() -> None:
    promtool("test", "rules", "kvhma-alerts.test.yml")
    tested = set(re.findall(r'alertname="(\w+)"', (EXAMPLES / "prometheus/kvhma-alerts.test.yml").read_text()))
    assert tested == {name for name, _ in alert_queries()}


@needs_promtool
def test_an_alert_that_does_not_fire_is_found(tmp_path: Path) -> None:
    """The test of the rules detects changes: with another threshold it fails."""
    for name in ("kvhma-alerts.yml", "kvhma-alerts.test.yml"):
        text = (EXAMPLES / "prometheus" / name).read_text()
        (tmp_path / name).write_text(text.replace("oldest_load_seconds > 30", "oldest_load_seconds > 30000"))
    ended = subprocess.run(
        [str(PROMTOOL), "test", "rules", "kvhma-alerts.test.yml"], cwd=tmp_path, capture_output=True, check=False
    )
    assert ended.returncode != 0


def test_every_query_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    if PROMTOOL is None:
        pytest.skip("no promtool: apt-get install prometheus")
    rules = [
        {"record": f"panel:{index}", "expr": expr.replace("$__rate_interval", "1m")}
        for index, (_, expr) in enumerate(dashboard_queries())
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(tmp_path / "rules.yml"))


def test_grafana_knows_every_field() -> None:
    """Grafana's classes read the dashboard and write the same again: they would lose an unknown field."""
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason="make dev installs it")
    from grafana_foundation_sdk.models.dashboard import Dashboard

    form = json.loads(DASHBOARD.read_text())
    written = json.loads(json.dumps(Dashboard.from_json(form), cls=encoder.JSONEncoder))
    assert contained(form, written) == []
    assert contained({**form, "pannels": []}, json.loads(json.dumps(written))) == ["/pannels"]


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


def test_the_dashboard_is_what_its_tool_writes() -> None:
    assert subprocess.run([sys.executable, ROOT / "tools/dashboard.py", "--check"], check=False).returncode == 0


def test_panels_do_not_overlap() -> None:
    form = json.loads(DASHBOARD.read_text())
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in form["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in form["panels"]]
    assert len(ids) == len(set(ids))


def test_operations_speaks_of_every_alert() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    for name, query in alert_queries():
        for metric in metrics_of(query):
            short = metric.removeprefix("vllm:kvhma_")
            assert short in text or metric in text, (name, metric)
