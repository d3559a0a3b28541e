# SPDX-License-Identifier: Apache-2.0
"""Where vLLM asks for a connector by its name: the page lists each place, with what it means for both of our names."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from vllm.config import KVTransferConfig, VllmConfig

from kvhma.versions import VLLM_READ, series

SOURCES = Path(vllm.__file__).parent
CONNECTORS = Path("distributed", "kv_transfer", "kv_connector")
FACTORY = CONNECTORS / "factory.py"
PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
NAMES = {
    "KvhmaConnector": {"kv_connector": "KvhmaConnector", "kv_connector_module_path": "kvhma.vllm"},
    "drop-in": {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvhma.vllm.drop_in"},
}


def texts(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def registered(sources: Path) -> set[str]:
    """The names that vLLM's factory registers."""
    tree = ast.parse((sources / FACTORY).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [call.args[0] for call in calls if ast.unparse(call.func) == "KVConnectorFactory.register_connector"]
    return {name.value for name in names if isinstance(name, ast.Constant)}


def places(sources: Path) -> set[tuple[str, str]]:
    """Functions outside of the connectors themselves with a connector's name, by module and name."""
    names, found = registered(sources), set()
    for file in sources.rglob("*.py"):
        own, text = file.relative_to(sources), file.read_text(encoding="utf-8")
        if own.is_relative_to(CONNECTORS) or not any(name in text for name in names):
            continue
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        module = ".".join(("vllm", *own.with_suffix("").parts)).removesuffix(".__init__")
        found |= {(module, function.name) for function in functions if texts(function) & names}
        inside = {node for function in functions for node in ast.walk(function)}
        loose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in inside} & names
        found |= {(module, name) for name in loose}
    return found


def on_the_page(version: str) -> set[tuple[str, str]]:
    """The places that the page lists for a series."""
    rows = re.findall(r"^\| `([\w.]+)`, `(\w+)` \| ([\d., ]+) \|", PAGE, re.MULTILINE)
    return {(module, name) for module, name, versions in rows if version in versions.split(", ")}


def test_each_place_is_on_the_page():
    version = "{}.{}".format(*series(vllm.__version__))
    assert version in VLLM_READ
    assert len(registered(SOURCES)) > 10
    assert places(SOURCES) == on_the_page(version)


@pytest.mark.parametrize("name", NAMES)
def test_vllm_asks_for_its_own_name(name):
    config = KVTransferConfig(kv_role="kv_both", **NAMES[name])
    assert config.has_connector("NixlConnector") == (name == "drop-in")
    several = {"connectors": [NAMES[name]]}
    config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=several)
    assert config.has_connector("NixlConnector") == (name == "drop-in")


@pytest.mark.parametrize("name", NAMES)
def test_an_offloading_size_replaces_the_connector(name):
    cache = SimpleNamespace(kv_offloading_size=1.0, kv_offloading_backend="native")
    config = SimpleNamespace(cache_config=cache, kv_transfer_config=KVTransferConfig(kv_role="kv_both", **NAMES[name]))
    VllmConfig._post_init_kv_transfer_config(config)
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"
