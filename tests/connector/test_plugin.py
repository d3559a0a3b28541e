# SPDX-License-Identifier: Apache-2.0
"""vLLM's own loader of plugins finds both connectors where kvhma is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvhma
from kvhma.errors import SettingsError

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
ROOT = Path(__file__).parents[2]
GROUP = "vllm.general_plugins"


def test_registering_imports_nothing_heavy_and_needs_no_vllm():
    """Every process of vLLM registers, also those of engines that use another connector."""
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from kvhma.vllm.plugin import register, register_drop_in\n"
        "register(); register_drop_in()\n"
        "heavy = {'torch', 'msgspec', 'cryptography', 'nixl', 'kvhma.vllm.connector', 'kvhma.nixl'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


vllm = pytest.importorskip("vllm", reason="needs vLLM; make connector runs it")
factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory", reason="needs vLLM")

from vllm import plugins
from vllm.config import KVTransferConfig

THEIRS = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Install kvhma's entry points as its wheel has them, and load plugins as a process of vLLM does."""
    info = tmp_path / f"kvhma-{kvhma.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvhma\nVersion: {kvhma.__version__}\n")
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    lines = "\n".join(f"{name} = {value}" for name, value in named.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {name: value for name, value in factory.KVConnectorFactory._registry.items() if name != "KvhmaConnector"}
    monkeypatch.setattr(factory.KVConnectorFactory, "_registry", own)

    def start(only=None):
        if only is None:
            monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        else:
            monkeypatch.setenv("VLLM_PLUGINS", only)
        monkeypatch.setattr(plugins, "plugins_loaded", False)
        plugins.load_general_plugins()

    return start


def connector(name, path=None):
    config = KVTransferConfig(kv_connector=name, kv_connector_module_path=path, kv_role="kv_producer", engine_id="e")
    return factory.KVConnectorFactory.get_connector_class(config)


def test_without_its_plugin_the_name_is_unknown(load):
    load("others")
    with pytest.raises(ValueError, match="Unsupported connector type: KvhmaConnector"):
        connector("KvhmaConnector")


def test_the_connector_needs_no_module_path(load):
    load()
    assert connector("KvhmaConnector").__module__ == "kvhma.vllm.connector"
    assert connector("KvhmaConnector") is connector("KvhmaConnector", "kvhma.vllm")
    load()  # vLLM may load plugins several times
    assert connector("KvhmaConnector").__module__ == "kvhma.vllm.connector"
    assert connector("NixlConnector").__module__.startswith(THEIRS), "no setting selects another one"
    assert connector("NixlConnector", "kvhma.vllm.drop_in") is connector("KvhmaConnector")


def test_the_drop_in_needs_no_module_path_where_it_is_asked_for(load):
    load("kvhma,kvhma_drop_in")
    assert connector("NixlConnector") is connector("KvhmaConnector") is connector("NixlConnector", "kvhma.vllm.drop_in")
    load("kvhma_drop_in")
    assert connector("NixlConnector") is connector("KvhmaConnector", "kvhma.vllm")


def test_a_drop_in_that_cannot_be_put_in_place_stops_the_engine(load, monkeypatch):
    """Otherwise the engine would run vLLM's own connector, which refuses kvhma's parameters with each request."""

    class Elsewhere:
        @staticmethod
        def register_connector(*names):
            pass

    monkeypatch.setattr(factory, "KVConnectorFactory", Elsewhere)
    load()
    with pytest.raises(SettingsError, match=r"VLLM_PLUGINS names kvhma_drop_in.*set kv_connector_module_path"):
        load("kvhma_drop_in")
