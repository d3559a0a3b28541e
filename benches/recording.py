# SPDX-License-Identifier: Apache-2.0
"""The half of benches/connectors.py in a worker: when it called its connector, whichever that is, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from support.engines.worker import Extension

PARTS = ("start_load_kv", "wait_for_save", "get_transfer_results", "get_kv_connector_stats")


class Recording(Extension):
    """What the tests' extension of a worker can do, and a record of every step of its connector."""

    def bench_record(self) -> None:
        """Start to record."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        steps: list[dict[str, Any]] = []
        self._bench_steps = steps
        bind = connector.bind_connector_metadata

        def bound(metadata: Any) -> None:
            found = (
                metadata.reqs_to_recv if hasattr(metadata, "reqs_to_recv") else [x.request_id for x in metadata.loads]
            )
            steps.append(
                {
                    "begun": time.perf_counter(),
                    "calls": 0.0,
                    "ordered": {},
                    "loaded": {},
                    "failed": [],
                    "ids": list(found),
                }
            )
            bind(metadata)

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def around(*args: Any, **kwargs: Any) -> Any:
                begun = time.perf_counter()
                result = call(*args, **kwargs)
                ended = time.perf_counter()
                step = steps[-1]
                step["calls"] += ended - begun
                if name == "start_load_kv":
                    step["ordered"] = dict.fromkeys(step["ids"], begun)
                elif name == "get_transfer_results":
                    step["loaded"] = dict.fromkeys(result.finished_recving, ended)
                    step["failed"] = list(result.failed_recving)
                return result

            return around

        connector.bind_connector_metadata = bound
        for name in PARTS:
            setattr(connector, name, timed(name, getattr(connector, name)))

    def bench_take(self) -> list[dict[str, Any]]:
        """Return the steps since the last call."""
        taken = list(self._bench_steps)
        self._bench_steps.clear()
        return taken
