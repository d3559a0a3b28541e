# SPDX-License-Identifier: Apache-2.0
"""A worker in a separate process: owns memory, prints its handshake payload, then answers one JSON command per line.

Started as ``python worker.py NAME PAGES SEED``; the first line it prints is the payload in hexadecimal. With PREWARM
in its environment it has prewarmed its transport before.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvhma.nixl import Agent
from support.flat import flat_geometry, labelled


def notifications(agent: Agent, count: int, seconds: float) -> list[tuple[str, str]]:
    """Collect until `count` have come, or for `seconds`."""
    news: list[tuple[str, str]] = []
    deadline = time.monotonic() + seconds
    while True:
        news += [(name, message.decode()) for name, message in agent.notifications()]
        if len(news) >= count or time.monotonic() > deadline:
            return news
        time.sleep(0.002)


def main() -> None:
    # NIXL logs to the standard output: reserve it for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, pages, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = labelled(pages, seed=seed)
    geometry = flat_geometry(memory)
    with Agent(name) as agent:
        if "PREWARM" in os.environ:
            agent.prewarm_transport()
        agent.register(geometry)
        print(agent.handshake_payload(geometry).hex(), file=answers, flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "notifications":
                answer: object = notifications(agent, command["count"], command["seconds"])
            else:
                raise ValueError(command)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
