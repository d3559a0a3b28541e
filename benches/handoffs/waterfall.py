# SPDX-License-Identifier: Apache-2.0
"""When each stage of a hand-off is over, as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from drawing import COLUMN, Drawing

STAGES = (
    "sent", "added", "ordered", "planned", "posted", "read", "checked", "reported", "scheduled", "first token"
)  # fmt: skip
"""From D's front end sending the request to its engine to its first token there. vLLM's connector checks nothing."""

_LEFT, _RIGHT, _LINE = 110, 120, 16


def stages(events: Iterable[tuple[str, str | None, float]], sent: float, first_token: float) -> dict[str, float]:
    """When each stage of the only request under way was first reached, in seconds after it was sent."""
    found = {"sent": 0.0}
    for stage, _, at in sorted(events, key=lambda event: event[2]):
        if at >= sent:
            found.setdefault(stage, at - sent)
    return found | {"first token": first_token}


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each stage that every run has, in the order of `STAGES`."""
    return {
        stage: statistics.median(run[stage] for run in runs) for stage in STAGES if all(stage in run for run in runs)
    }


def draw(title: str, by_connector: Mapping[str, Mapping[str, float]]) -> str:
    """An SVG: a block for each connector, in it a line for each stage, in it a bar since the stage before."""
    longest = max(max(of.values()) for of in by_connector.values()) or 1.0
    scale = (COLUMN - _LEFT - _RIGHT) / longest
    drawing = Drawing(COLUMN, title, "Milliseconds from the request sent to D's engine to its first token, by stage.")
    drawing.text(12, 26, title, "head")
    y = 52.0
    for color, (connector, reached) in enumerate(by_connector.items()):
        drawing.text(12, y, connector)
        y += _LINE * 0.5
        before = 0.0
        for stage, at in reached.items():
            y += _LINE
            drawing.text(_LEFT - 8, y, stage, "end small")
            hover = f"{connector}: {stage} after {at * 1e3:.2f} ms, {(at - before) * 1e3:.2f} ms after the stage before"
            start = min(before, at)
            drawing.rect(_LEFT + start * scale, y - _LINE + 6, abs(at - before) * scale, _LINE - 5, f"c{color}", hover)
            drawing.text(
                _LEFT + max(before, at) * scale + 6, y, f"{at * 1e3:.2f} ms, +{(at - before) * 1e3:.2f}", "small soft"
            )
            before = at
        y += 2 * _LINE
    return drawing.svg(y)
