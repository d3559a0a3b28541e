# SPDX-License-Identifier: Apache-2.0
"""The dashboard for Grafana: examples/grafana/kvhma.json.

    python tools/dashboard.py            # writes it
    python tools/dashboard.py --check    # exit code 1 if the file differs

A panel is a line below: its title, the unit, and a query for each series. `rate` is over Grafana's interval.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "examples/grafana/kvhma.json"
_OF_ENGINES = '{instance=~"$instance",model_name=~"$model"}'
_COLUMNS, _HEIGHT = 3, 8


@dataclass(frozen=True)
class Panel:
    """A graph.

    Attributes:
        title: what it shows, as short as possible.
        text: how to read it.
        unit: Grafana's name of the unit.
        queries: PromQL by the series' legend.
    """

    title: str
    text: str
    unit: str
    queries: dict[str, str]


def rate(name: str, by: str = "instance") -> str:
    """Return how much a counter grows in a second, by a label."""
    return f"sum by ({by}) (rate(vllm:kvhma_{name}{_OF_ENGINES}[$__rate_interval]))"


def gauge(name: str) -> str:
    """Return the value of a gauge at each engine."""
    return f"max by (instance) (vllm:kvhma_{name}{_OF_ENGINES})"


def quantile(name: str, of: float) -> str:
    """Return a quantile of a histogram over all selected engines."""
    return f"histogram_quantile({of}, {rate(f'{name}_bucket', 'le')})"


def quantiles(name: str) -> dict[str, str]:
    """Return the median, and the 90th and 99th percentiles."""
    return {f"p{of}": quantile(name, of / 100) for of in (50, 90, 99)}


def mean(name: str) -> str:
    """Return the mean of a histogram."""
    return f"{rate(f'{name}_sum', 'le')} / {rate(f'{name}_count', 'le')}".replace("by (le) ", "")


ROWS = {
    "Does the cache move?": [
        Panel("Loads", "Loads that succeeded at D.", "ops", {"{{instance}}": rate("load_seconds_count")}),
        Panel(
            "Tokens of prompts",
            "As vLLM counts them. external_kv_transfer: loaded, D's. local_compute: computed, P's.",
            "ops",
            {
                "{{instance}}: {{source}}": rate("prompt_tokens_by_source_total", "instance, source").replace(
                    "kvhma_", ""
                )
            },
        ),
        Panel(
            "What did not move",
            "Failed loads by cause, and prompts that D computed itself by reason. Operations says what each means.",
            "ops",
            {
                "failed: {{cause}}": rate("failed_loads_total", "cause"),
                "computed: {{reason}}": rate("local_prefills_total", "reason"),
            },
        ),
        Panel("Bytes", "What D reads.", "binBps", {"{{instance}}": rate("bytes_sum")}),
        Panel(
            "Tokens",
            "loaded: moved. cached: D had them already. clipped: before windows and chunks, so not needed.",
            "ops",
            {
                name: rate(f"tokens_{name}_total", "le").replace("by (le) ", "")
                for name in ("loaded", "cached", "clipped")
            },
        ),
    ],
    "How long does it take?": [
        Panel("Load", "From the scheduler's order to the end of a load.", "s", quantiles("load_seconds")),
        Panel(
            "Parts of a load",
            "90th percentile. post: the cost of descriptors. transfer: the network. zero: a GPU that lags. "
            "handshake: once for each pair of engines.",
            "s",
            {name: quantile(f"{name}_seconds", 0.9) for name in ("post", "transfer", "zero", "handshake")},
        ),
        Panel(
            "Bytes of a group",
            "Bytes by group of layers.",
            "binBps",
            {"{{group}}": rate("group_bytes_total", "group")},
        ),
        Panel(
            "Bytes in a second, by rank",
            "While a rank transfers. The slowest rank decides when a request continues.",
            "binBps",
            {
                "{{instance}} rank {{rank}}": f"{rate('rank_bytes_total', 'instance, rank')} / "
                f"{rate('rank_seconds_total', 'instance, rank')}"
            },
        ),
        Panel(
            "Descriptors of a load",
            "Planned, and what NIXL posted after joining neighbours.",
            "short",
            {"planned": mean("selected_descriptors"), "posted": mean("posted_descriptors")},
        ),
        Panel(
            "Descriptors of a group",
            "Which groups cost descriptors.",
            "ops",
            {"{{group}}": rate("group_descriptors_total", "group")},
        ),
        Panel(
            "Zeroed",
            "Bytes after the tokens of loads.",
            "binBps",
            {"{{instance}}": rate("zeroed_bytes_total")},
        ),
        Panel(
            "Loads that wait for the GPU",
            "Reads that were not posted at once: the GPU was still zeroing or in an earlier step.",
            "ops",
            {"{{instance}}": rate("delayed_posts_total")},
        ),
    ],
    "What does P hold?": [
        Panel(
            "Leases",
            "Finished requests that P holds for readers, and answers that D holds for next turns.",
            "short",
            {"{{instance}}": gauge("held_leases"), "{{instance}} answers": gauge("held_answers")},
        ),
        Panel("Blocks", "Held for them.", "short", {"{{instance}}": gauge("pinned_blocks")}),
        Panel(
            "Oldest unread request",
            "A value that falls is a queue, a value that grows is a reader that is gone.",
            "s",
            {"{{instance}}": gauge("oldest_unread_seconds")},
        ),
        Panel(
            "Expired or evicted unread",
            "Leases that ended by reason, requests evicted for newer ones, prompts without room in host memory.",
            "ops",
            {
                "ended: {{reason}}": rate("expired_total", "reason"),
                "dropped": rate("held_dropped_total"),
                "staging full": rate("staging_full_total"),
            },
        ),
        Panel("Answers", "How answers for next turns ended.", "ops", {"{{end}}": rate("answers_total", "end")}),
        Panel(
            "Loads in flight",
            "On D: loads that have not ended, and seconds since the oldest was scheduled.",
            "short",
            {
                "{{instance}}": gauge("loads_in_flight"),
                "{{instance}} oldest (s)": gauge("oldest_load_seconds"),
                "{{instance}} outlasted their lease (1/s)": rate("slow_loads_total"),
            },
        ),
    ],
    "Is anything wrong?": [
        Panel(
            "Handshakes",
            "With other engines; more than a few an hour are engines that come and go.",
            "ops",
            {"{{instance}}": rate("handshakes_total"), "{{instance}} closed as idle": rate("idle_engines_total")},
        ),
        Panel(
            "Refused",
            "Sources that are not allowed, engines beyond max_peers, changed parameters, connections by reason.",
            "ops",
            {
                "source: {{reason}}": rate("refused_sources_total", "reason"),
                "connection: {{reason}}": rate("side_channel_refused_total", "reason"),
                "engine": rate("refused_engines_total"),
                "parameters": rate("digest_refused_total"),
                "notification": rate("dropped_notifications_total"),
            },
        ),
        Panel(
            "The connector itself",
            "Stalled processes, restarted threads, abandoned leases. It should be empty.",
            "ops",
            {
                "stalls": rate("stalls_total"),
                "thread {{thread}}": rate("thread_restarts_total", "thread"),
                "abandoned": rate("abandoned_leases_total"),
            },
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return it as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"type": "row", "id": len(panels) + 1, "title": title, "collapsed": False, "gridPos": place})
        panels[-1]["panels"] = []
        y += 1
        for index, panel in enumerate(row):
            column, line = index % _COLUMNS, index // _COLUMNS
            width = 24 // _COLUMNS
            place = {"h": _HEIGHT, "w": width, "x": column * width, "y": y + line * _HEIGHT}
            panels.append(_graph(panel, len(panels) + 1, place))
        y += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "uid": "kvhma",
        "title": "kvhma: KV cache transfer",
        "description": "Prefill and decode engines. https://github.com/kvhma/kvhma",
        "tags": ["vllm", "kvhma"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "schemaVersion": 39,
        "templating": {"list": [_SOURCE, _variable("instance", "Engine"), _variable("model_name", "Model", "model")]},
        "panels": panels,
    }


_SOURCE = {"type": "datasource", "name": "source", "label": "Prometheus", "query": "prometheus", "hide": 0}


def _variable(label: str, title: str, name: str = "") -> dict[str, Any]:
    return {
        "type": "query",
        "name": name or label,
        "label": title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": f"label_values(vllm:kvhma_load_seconds_count, {label})",
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _graph(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def main() -> int:
    """Write it, or compare it with the file."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        return int(FILE.read_text(encoding="utf-8") != text)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
