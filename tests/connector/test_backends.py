# SPDX-License-Identifier: Apache-2.0
"""Every attention backend of the installed vLLM against docs/formats.md, both ways."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.v1.attention.backend import AttentionBackend, subclass_attention_backend
from vllm.v1.attention.backends import composite
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvhma.vllm.caches.formats import Writer, backend_name, is_by_head, section_bytes
from support.attention_backends import backends_of

SERIES = ".".join(vllm.__version__.split(".")[:2])
ROOT = Path(vllm.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
SOURCE = backends_of(ROOT)


@dataclass(frozen=True)
class Row:
    """A line of the table in the docs."""

    classes: frozenset[str]
    versions: tuple[str, ...]
    page: str


def documented() -> dict[str, Row]:
    cells = re.findall(r"^\| `([\w/]+)` \| ([\w, ]+) \| ([\d., ]+) \| ([\w `]+) \|", PAGE.read_text(), re.M)
    return {
        name: Row(frozenset(classes.split(", ")), tuple(versions.split(", ")), page)
        for name, classes, versions, page in cells
    }


ROWS = documented()


def test_the_page_has_every_backend_of_the_installed_version_and_no_other():
    assert {name: set(row.classes) for name, row in ROWS.items() if SERIES in row.versions} == SOURCE.names()


def test_every_backend_that_vllm_registers_was_read():
    paths = [kind.value for enum in (AttentionBackendEnum, MambaAttentionBackendEnum) for kind in enum if kind.value]
    registered = {tuple(path.rsplit(".", 1)) for path in paths}
    nowhere = {("vllm.v1.attention.backends.no_attention", "NoAttentionBackend")}  # a path without a module
    assert len(registered) > 40
    assert registered - {*SOURCE.classes, *SOURCE.composites} <= nowhere


IMPORT = """
import importlib, json, sys
from kvhma.vllm.caches.formats import backend_name
# vLLM has loaded the build for this processor. Some backends import another one, which would end the process.
sys.modules.setdefault("vllm._C", type(sys)("vllm._C"))
found = {}
for module, name in json.loads(sys.stdin.read()):
    try:
        found[f"{module}.{name}"] = backend_name(getattr(importlib.import_module(module), name))
    except Exception as error:
        found[f"{module}.{name}"] = None
print("found", json.dumps(found))
"""


def test_the_source_says_what_the_classes_say():
    """Most of vLLM's backends can be imported without a GPU. In a separate process, since they register operators."""
    keys = [*SOURCE.classes, *SOURCE.composites]
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT], input=json.dumps(keys), capture_output=True, text=True, check=True
    )
    found = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("found"))[5:])
    read = {".".join(key): name for key, (name, _) in SOURCE.classes.items()}
    read |= {".".join(key): SOURCE.classes[writes][0] for key, (_, writes) in SOURCE.composites.items()}
    imported = {key: name for key, name in found.items() if name is not None}
    assert imported == {key: read[key] for key in imported}
    assert len(imported) > 40


def test_composites_are_what_their_writer_is():
    assert len(SOURCE.composites) >= 2
    for name, writes in SOURCE.composites.values():
        assert ROWS[name].page == f"as `{SOURCE.classes[writes][0]}`"


def child(name: str, written: list[str]) -> type[AttentionBackend]:
    """Return a backend that records which child writes."""

    class Impl:
        def do_kv_cache_update(self) -> None:
            written.append(name)

        do_rope_and_kv_cache_update = do_qk_norm_rope_kvcache_update = do_kv_cache_update
        supports_quant_query_input = supports_pcp = supports_dcp = True
        can_return_lse_for_decode = need_to_return_lse_for_decode = lse_base_on_e = True
        supports_mtp_with_cp_non_trivial_interleave_size = True

    class Builder:
        requires_block_table_width = False

    class Backend(AttentionBackend):
        forward_includes_kv_cache_update = False
        get_name = staticmethod(lambda: name)
        get_impl_cls = staticmethod(lambda: Impl)
        get_builder_cls = staticmethod(lambda: Builder)
        full_cls_name = classmethod(lambda cls: (name, name))

    Backend.__module__ = "vllm.own"
    return Backend


@pytest.mark.parametrize(
    "method", ["do_kv_cache_update", "do_rope_and_kv_cache_update", "do_qk_norm_rope_kvcache_update"]
)
def test_a_composite_lets_the_child_write_whose_name_it_has(method):
    """By vLLM's own composition: every way to write goes to the child that kvhma takes the format from."""
    written: list[str] = []
    general, causal = child("GENERAL", written), child("CAUSAL", written)
    both = composite.create_composite_attention_backend(
        general,
        causal,
        name="Both",
        backend_name="GENERAL_CAUSAL",
        module="vllm.own",
        routing_policy=composite.MMPrefixAttentionRouting,
    )
    assert (both.get_name(), backend_name(both)) == ("GENERAL_CAUSAL", "GENERAL")
    getattr(both.get_impl_cls()(), method)()
    assert written == ["GENERAL"]


def test_a_backend_that_only_schedules_in_another_way_is_its_base():
    """vLLM makes one backend for each layer with sinks or chunks."""
    own = subclass_attention_backend("Chunked", CPUAttentionBackend, object)  # type: ignore[arg-type]
    assert own is not CPUAttentionBackend
    assert backend_name(own) == "CPU_ATTN"


@pytest.mark.parametrize("method", ["get_impl_cls", "customize_spec"])
def test_a_subclass_with_kernels_or_a_page_of_its_own_is_not_its_base(method):
    own = type("Own", (CPUAttentionBackend,), {method: staticmethod(lambda: None), "__module__": "vllm.own"})
    assert own.get_name() == "CPU_ATTN"
    assert backend_name(own) == "CPU_ATTN/Own"


def test_a_class_of_a_plug_in_is_not_taken_for_vllm_s():
    own = type("Own", (AttentionBackend,), {"get_name": staticmethod(lambda: "FLASH_ATTN"), "__module__": "plug_in"})
    assert backend_name(own) == "FLASH_ATTN/Own"


HEADS = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
ROWS_OF = {"block_size": 64, "num_kv_heads": 1, "max_tp_shards": 1}
LATENT = MLAAttentionSpec(**ROWS_OF, head_size=24, dtype=torch.bfloat16)
FLOATS = MLAAttentionSpec(**ROWS_OF, head_size=24, dtype=torch.float32)


def pages_of(backend: str) -> set[str]:
    """Return how a backend's cache is cut, over plain specs of all shapes."""
    kernel = "vec" if backend == "CPU_ATTN" else None
    writer = Writer(backend, "cuda", "9.0", version=f"{SERIES}.0", cpu_kernel=kernel)
    rows: list[tuple[Any, str, int]] = [(LATENT, "bfloat16", 48), (FLOATS, "float32", 96)]
    found = {"by head"} if is_by_head(HEADS, writer) else set()
    found |= {"by row" for spec, dtype, size in rows if section_bytes(spec, dtype, size, writer) == (size,)}
    return found


@pytest.mark.parametrize("name", sorted(name for name, row in ROWS.items() if SERIES in row.versions))
def test_a_backend_is_cut_as_the_page_says(name):
    page = ROWS[name].page
    if page.startswith("as "):
        page = ROWS[page[4:-1]].page
    # The window of DeepSeek-V4 may be plain floats. tests/connector/test_formats.py has both sections.
    expected = {"by head": {"by head"}, "by row": {"by row"}}.get(page, set())
    if name == "DEEPSEEK_SPARSE_SWA":
        expected = {"by row"}
    assert pages_of(name) == expected


def test_a_backend_that_nobody_read_is_whole():
    assert pages_of("SOMEBODY_S_OWN") == pages_of("TRITON_ATTN/Own") == pages_of("") == set()
