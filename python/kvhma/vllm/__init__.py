# SPDX-License-Identifier: Apache-2.0
"""A vLLM connector for hybrid models, loaded out of tree with ``"kv_connector": "KvhmaConnector"``.

Where kvhma is not installed but on the path, add ``"kv_connector_module_path": "kvhma.vllm"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhma.vllm.connector import KvhmaConnector

__all__ = ["KvhmaConnector"]


def __getattr__(name: str) -> Any:
    # What does not need vLLM, parameters and messages among it, can be imported without it.
    if name == "KvhmaConnector":
        from kvhma.vllm.connector import KvhmaConnector

        return KvhmaConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
