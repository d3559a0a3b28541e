# SPDX-License-Identifier: Apache-2.0
"""Unknown formats pair between releases of vLLM whose writers have the same source, and between no others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm
from vllm.model_executor.layers.attention import Attention
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
from vllm.v1.kv_cache_interface import (
    MLAAttentionSpec,
)

import kvhma
from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Geometry
from kvhma.vllm.caches import writer_source
from kvhma.vllm.caches.formats import Writer
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.caches.layer_parts import RankInfo
from kvhma.vllm.caches.writer_source import files_of, source_fingerprint
from support.vllm_caches import allocated

V4 = (DeepseekV4IndexerCache, DeepseekV4IndexerBackend)


@pytest.fixture
def tree(tmp_path):
    """A vLLM of six files: a layer, its backend, its kernel, what schedules it, the specs and something else."""
    files = {
        "models/own/layer.py": "from vllm.v1.attention.backends.own import B\nfrom . import kernel\nimport vllm.config",
        "models/own/kernel.py": "def write(): ...",
        "v1/attention/backends/own.py": "def late():\n    from vllm.v1.attention.ops.store import store",
        "v1/attention/ops/store.py": "import torch",
        "v1/attention/ops/unused.py": "",
        "v1/kv_cache_interface.py": "",
        "config.py": "import vllm.v1.attention.ops.unused",
    }
    for name, text in files.items():
        tmp_path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(name).write_text(text)
    return tmp_path


def test_what_belongs_to_a_writer(tree):
    assert set(files_of(["vllm.models.own.layer"], tree)) == {
        "vllm.models.own.layer",
        "vllm.models.own.kernel",
        "vllm.v1.attention.backends.own",
        "vllm.v1.attention.ops.store",
    }


@pytest.mark.parametrize("changed", ["models/own/kernel.py", "v1/attention/ops/store.py", "v1/kv_cache_interface.py"])
def test_a_change_of_any_of_it_is_seen(tree, monkeypatch, changed):
    monkeypatch.setattr(vllm, "__file__", str(tree / "__init__.py"))
    modules = frozenset({"vllm.models.own.layer"})
    find = writer_source._fingerprint_of.__wrapped__
    before = find(modules)
    assert re.fullmatch("[0-9a-f]{16}", before)
    (tree / "config.py").write_text("# of no layer")
    assert find(modules) == before
    with (tree / changed).open("a") as file:
        file.write("\n# other bytes")
    assert find(modules) != before


def test_a_module_without_a_file_has_none(tree, monkeypatch):
    monkeypatch.setattr(vllm, "__file__", str(tree / "__init__.py"))
    assert writer_source._fingerprint_of.__wrapped__(frozenset({"vllm.models.own.compiled"})) == ""


def test_a_class_of_somebody_else_has_none():
    own = type("Own", (CPUAttentionBackend,), {"__module__": "plug_in"})
    assert source_fingerprint((Attention, CPUAttentionBackend)) != ""
    assert source_fingerprint((Attention, own)) == ""


def test_the_kernels_of_deepseek_v4_belong_to_its_writer():
    """Its compressed cache is written by kernels in Python, which the layer's module imports, some of them late."""
    modules = {base.__module__ for base in (*V4, DeepseekV4FlashMLABackend)}
    found = files_of(modules, Path(vllm.__file__).parent)
    stores = {
        "vllm.models.deepseek_v4.compressor",
        "vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache",
        "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl",
    }
    assert stores <= found.keys()
    assert len(found) < 60


def test_another_process_finds_the_same():
    """Another process finds the same, with any earlier imports."""
    ask = (
        "from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache as layer\n"
        "from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend as backend\n"
        "from kvhma.vllm.caches.writer_source import source_fingerprint\n"
        "print(source_fingerprint((layer, backend)))"
    )
    ran = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == source_fingerprint(V4) != source_fingerprint((Attention, CPUAttentionBackend))


def engine(version: str, classes: tuple[type, ...] = V4, backend: str = "DEEPSEEK_V4_INDEXER") -> Geometry:
    """Return the geometry of a cache that moves whole, as an engine with a version of vLLM has it."""
    spec = MLAAttentionSpec(
        block_size=256, num_kv_heads=1, max_tp_shards=1, head_size=132, dtype=torch.uint8, tokens_per_state=4
    )
    _, views, config = allocated(spec, 2)
    writer = Writer(backend, "cuda", "9.0", "indexer-fp8/float32", version, classes=classes)
    return geometry_of(config, views, RankInfo(), writer=lambda _: writer)


@pytest.mark.parametrize("theirs", ["0.33.0", "0.33.1", "0.33.0.post1", "0.33.2+cu130"])
def test_releases_with_one_source_pair(theirs):
    assert kvhma.plan(engine("0.33.0"), [engine(theirs)]).sources == [0]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("0.33.0", "0.32.0"),
        ("0.33.0", "0.33.1.dev7+g1234567"),
        ("0.33.0", "0.33.1rc1"),
        ("0.33.1.dev7+g1234567", "0.33.1.dev8+g2345678"),
    ],
)
def test_other_series_and_versions_under_development_do_not(mine, theirs):
    with pytest.raises(UnsupportedPairError, match=r"content cannot be paired: .*cuda/9\.0/0\.3.*cuda/9\.0/0\.3"):
        kvhma.plan(engine(mine), [engine(theirs)])
    assert kvhma.plan(engine(theirs), [engine(theirs)]).sources == [0]


def test_releases_whose_writers_differ_do_not(monkeypatch):
    mine = engine("0.33.0")
    monkeypatch.setattr("kvhma.vllm.caches.formats.source_fingerprint", lambda classes: "0123456789abcdef")
    with pytest.raises(UnsupportedPairError, match=r"0\.33-0123456789abcdef.*0\.33-[0-9a-f]{16}"):
        kvhma.plan(mine, [engine("0.33.1")])


def test_where_no_source_is_found_the_version_is_compared(monkeypatch):
    monkeypatch.setattr("kvhma.vllm.caches.formats.source_fingerprint", lambda classes: "")
    with pytest.raises(UnsupportedPairError, match=r"0\.33\.0.*0\.33\.1"):
        kvhma.plan(engine("0.33.0"), [engine("0.33.1")])
