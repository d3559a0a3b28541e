# SPDX-License-Identifier: Apache-2.0
"""The connector under the name that vLLM, and code around it, tests for.

``{"kv_connector": "NixlConnector", "kv_connector_module_path": "kvhma.vllm.drop_in"}`` loads it in place of
vLLM's own, and everything that vLLM does for a connector of this name applies. Where a module path cannot be given, the
plugin ``kvhma_drop_in`` does the same.
"""

from kvhma.vllm.connector import KvhmaConnector

NixlConnector = KvhmaConnector
