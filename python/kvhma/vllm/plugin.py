# SPDX-License-Identifier: Apache-2.0
"""Entry points of ``vllm.general_plugins``: if kvhma is installed, vLLM knows the connector by its name.

vLLM calls them in each of its processes, possibly several times. Registering does not import the connector: vLLM
imports it when a configuration names it.
"""

from __future__ import annotations

import contextlib

from kvhma.errors import SettingsError

DROP_IN = "kvhma_drop_in"
"""The name in ``VLLM_PLUGINS`` that makes kvhma a drop-in for vLLM's NixlConnector."""


def register() -> None:
    """Register ``KvhmaConnector``. Does nothing without vLLM, or if vLLM's registry has moved."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        return
    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector("KvhmaConnector", "kvhma.vllm.connector", "KvhmaConnector")


def register_drop_in() -> None:
    """Register the connector as ``NixlConnector``, in place of vLLM's own, if ``VLLM_PLUGINS`` names this plugin.

    Without that variable vLLM loads every plugin, and an installed package must not replace a configured connector.

    Raises:
        SettingsError: this version of vLLM does not allow connectors to be replaced.
    """
    try:
        from vllm import envs
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        return
    if DROP_IN not in (envs.VLLM_PLUGINS or ()):
        return
    registry = getattr(KVConnectorFactory, "_registry", None)
    if not isinstance(registry, dict):
        raise SettingsError(
            f"VLLM_PLUGINS names {DROP_IN}, but this vLLM keeps its connectors elsewhere; set kv_connector_module_path "
            "to kvhma.vllm.drop_in instead"
        )
    registry.pop("NixlConnector", None)
    KVConnectorFactory.register_connector("NixlConnector", "kvhma.vllm.drop_in", "NixlConnector")
