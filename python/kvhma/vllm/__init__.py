# SPDX-License-Identifier: Apache-2.0
"""A vLLM connector for hybrid models, loaded out of tree with ``"kv_connector": "KvhmaConnector"``.

If kvhma is on the path but not installed, add ``"kv_connector_module_path": "kvhma.vllm"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvhma.vllm.wire import peer_log  # noqa: F401 - it protects the log before any module writes to it

if TYPE_CHECKING:
    from kvhma.vllm.connector import KvhmaConnector

__all__ = ["KvhmaConnector"]


def __getattr__(name: str) -> Any:
    # Lazy: parameters and messages can be imported without vLLM.
    if name == "KvhmaConnector":
        from kvhma.vllm.connector import KvhmaConnector

        return KvhmaConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
