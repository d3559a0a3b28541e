# SPDX-License-Identifier: Apache-2.0
"""The connector as a drop-in, under the name that vLLM and code around it check for.

``{"kv_connector": "NixlConnector", "kv_connector_module_path": "kvhma.vllm.drop_in"}`` loads it in place of vLLM's own
connector, and vLLM treats it as a connector of this name. If you cannot set a module path, the plugin ``kvhma_drop_in``
does the same.
"""

from kvhma.vllm.connector import KvhmaConnector

NixlConnector = KvhmaConnector
