# SPDX-License-Identifier: Apache-2.0
"""How NIXL is opened, and how its version is found: with a library of the same form. tests/nixl has the real one."""

from __future__ import annotations

import importlib.metadata
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from kvhma.errors import RequestError
from kvhma.nixl import library as library_module
from kvhma.nixl.library import PROGRESS_DELAY_US, AgentOptions, import_nixl, open_nixl, takes_strided


class Sync(Enum):
    NIXL_THREAD_SYNC_RW = 3


class BindingConfig:
    """Accepts only the fields of NIXL's class, as a class of pybind11 does."""

    __slots__ = ("captureTelemetry", "pthrDelay", "syncMode", "useProgThread")


class Binding:
    __module__ = "nixl_test._bindings"

    def __init__(self, name, config):
        self.name, self.config = name, config


class Api:
    """The part of NIXL's Python API that is used to open it."""

    made: ClassVar[list[Api]] = []

    def __init__(self, name, config):
        self.name, self.config = name, config
        self.agent = Binding(name, None)
        assert config.backends == []
        self.backends = {}
        self.options = {}
        Api.made.append(self)

    def get_plugin_list(self):
        return ["UCX", "POSIX", "UCCL"]

    def create_backend(self, backend, options):
        self.backends[backend] = self.agent
        self.options[backend] = options


Api.__module__ = "nixl_test._api"


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """Install it in NIXL's place; return its bindings."""
    Api.made.clear()
    api, bindings = ModuleType("nixl_test._api"), ModuleType("nixl_test._bindings")
    api.nixl_agent, api.nixl_thread_sync_t = Api, Sync
    api.nixl_agent_config = SimpleNamespace
    bindings.nixlAgentConfig, bindings.nixlAgent = BindingConfig, Binding
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setitem(sys.modules, "nixl_test._bindings", bindings)
    return bindings


RCACHE, ZCOPY = "UCX_RCACHE_MAX_UNRELEASED", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


@pytest.mark.parametrize(
    ("name", "given", "imported", "driver", "expected"),
    [
        (RCACHE, None, False, False, "1024"),
        (RCACHE, "7", False, False, "7"),
        (RCACHE, None, True, False, None),
        (ZCOPY, None, False, True, "on"),
        (ZCOPY, "n", False, True, "n"),
        (ZCOPY, None, False, False, None),
    ],
)
def test_the_environment_is_set_before_the_first_import(monkeypatch, tmp_path, name, given, imported, driver, expected):
    environ = {} if given is None else {name: given}
    monkeypatch.setattr(library_module.os, "environ", environ)
    monkeypatch.setattr(library_module, "_CUDA_DRIVER", tmp_path if driver else tmp_path / "absent")
    api = sys.modules["nixl._api"]
    if not imported:
        monkeypatch.delitem(sys.modules, "nixl")
    monkeypatch.setattr(library_module.importlib, "import_module", {"nixl._api": api}.__getitem__)
    import_nixl()
    assert environ.get(name) == expected


def test_the_package_of_rocm(monkeypatch):
    imported = []
    api = sys.modules["nixl._api"]

    def only(*names):
        def find(name):
            imported.append(name)
            if name not in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
            return api

        return find

    for packages, package, expected in (
        (("nixl._api", "nixl_rocm._api"), None, ["nixl._api"]),
        (("nixl._api", "nixl_rocm._api"), "nixl_rocm", ["nixl_rocm._api"]),
        (("nixl_rocm._api",), None, ["nixl._api", "nixl_rocm._api"]),
    ):
        imported.clear()
        monkeypatch.setattr(library_module.importlib, "import_module", only(*packages))
        assert import_nixl(package) is api
        assert imported == expected
    monkeypatch.setattr(library_module.importlib, "import_module", only())
    with pytest.raises(ImportError, match=r"pip install --no-deps nixl .*No module named 'nixl._api'"):
        open_nixl("A", AgentOptions())
    with pytest.raises(RequestError, match=r"package is 'other', expected one of \['nixl', 'nixl_rocm'\]"):
        open_nixl("A", AgentOptions(package="other"))


@pytest.mark.parametrize(("options", "delay"), [({}, PROGRESS_DELAY_US), ({"progress_delay_us": 20}, 20)])
def test_a_delay_is_set_before_there_is_a_backend(options, delay):
    agent = open_nixl("A", AgentOptions(**options))
    assert Api.made == [agent]
    below = agent.agent
    assert (below.name, below.config.pthrDelay) == ("A", delay)
    assert (below.config.useProgThread, below.config.captureTelemetry, below.config.syncMode) == (True, True, 3)
    assert agent.backends == {"UCX": below}


def test_without_a_delay_the_agent_is_as_nixl_made_it():
    agent = open_nixl("A", AgentOptions(progress_delay_us=0))
    assert agent.agent.config is None
    assert (agent.config.enable_prog_thread, agent.config.capture_telemetry) == (True, True)
    assert agent.config.sync_mode is Sync.NIXL_THREAD_SYNC_RW
    assert agent.backends == {"UCX": agent.agent}


def test_a_nixl_whose_binding_has_no_delay(library):
    library.nixlAgentConfig = type("Config", (), {"__slots__": ("captureTelemetry", "syncMode", "useProgThread")})
    with pytest.raises(ImportError, match=r"pthrDelay.*progress_delay_us=0"):
        open_nixl("A", AgentOptions())
    assert open_nixl("A", AgentOptions(progress_delay_us=0)).backends


def test_a_nixl_that_keeps_its_binding_elsewhere(monkeypatch):
    monkeypatch.setattr(Api, "__init__", lambda self, name, config: None)
    with pytest.raises(ImportError, match=r"'agent'.*progress_delay_us=0"):
        open_nixl("A", AgentOptions())


@pytest.mark.parametrize("delay", [-1, 1_000_001])
def test_a_delay_out_of_range(delay):
    with pytest.raises(RequestError, match=rf"progress_delay_us is {delay}, expected 0 to 1000000"):
        open_nixl("A", AgentOptions(progress_delay_us=delay))
    assert not Api.made


def test_threads_by_backend():
    agent = open_nixl("A", AgentOptions(backends=("UCX", "UCCL", "POSIX"), num_threads=4))
    assert agent.options == {"UCX": {"num_threads": "4"}, "UCCL": {"num_cpus": "4"}, "POSIX": {}}
    assert open_nixl("A", AgentOptions(backends=("POSIX",))).options == {"POSIX": {}}
    with pytest.raises(RequestError, match=r"num_threads is 4, but no backend of \['POSIX'\] has such an option"):
        open_nixl("A", AgentOptions(backends=("POSIX",), num_threads=4))


@pytest.mark.parametrize(
    ("version", "strided"),
    [
        ("0.9", False),
        ("1.3.0", False),
        ("1.4.12", False),
        ("1.5.0", True),
        ("1.10.0", True),
        ("2.0.0rc1", True),
        ("dev", False),
        (None, False),
    ],
)
def test_strided_rows_by_version(monkeypatch, version, strided):
    def installed(name):
        if name == "nixl_test" and version is not None:
            return version
        raise importlib.metadata.PackageNotFoundError(name)

    agent = open_nixl("A", AgentOptions())
    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert takes_strided(agent) is strided
