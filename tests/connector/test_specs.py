# SPDX-License-Identifier: Apache-2.0
"""Every KV cache spec that vLLM has, through vLLM's own grouping, allocation and views, against docs/formats.md."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

import kvhma
from kvhma.errors import GeometryError, UnsupportedPairError
from kvhma.geometry import Geometry
from kvhma.vllm.caches.formats import KINDS, NOT_TRANSFERRED, REFUSED, Writer, encoding_of, transferred_groups
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.caches.layer_parts import RankInfo
from kvhma.vllm.config.engine_config import engine_facts
from kvhma.vllm.config.settings import Settings
from support.vllm_grouping import get_kv_cache_config_from_groups, get_kv_cache_groups
from support.writers import execute

SERIES = ".".join(vllm.__version__.split(".")[:2])
PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
BF16 = torch.bfloat16
ALONE = RankInfo()
ATTENTION = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": BF16}
LATENT = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": BF16, "max_tp_shards": 1}
RING = {"block_size": 8, "num_kv_heads": 2, "head_size": 32, "head_size_v": 0, "dtype": BF16}

SAMPLES: dict[str, dict[str, Any]] = {
    "FullAttentionSpec": ATTENTION,
    "SlidingWindowSpec": ATTENTION | {"sliding_window": 24},
    "ChunkedLocalAttentionSpec": ATTENTION | {"attention_chunk_size": 32},
    "RSWASpec": ATTENTION | {"rswa_window": 32},
    "SinkFullAttentionSpec": ATTENTION | {"sink_len": 16},
    "MLAAttentionSpec": LATENT,
    "SlidingWindowMLASpec": LATENT | {"sliding_window": 24},
    "HiddenStateCacheSpec": ATTENTION | {"num_kv_heads": 3},
    "MambaSpec": {
        "block_size": 16,
        "shapes": ((32, 3), (4, 4, 8)),
        "dtypes": (BF16, torch.float32),
        "page_size_padded": 1024,
    },
    "CircularBufferSpec": RING,
    "KpoolTailSpec": RING | {"block_size": 16, "head_size": 16, "sliding_window": 16},
    "EncoderOnlyAttentionSpec": ATTENTION,
    "CrossAttentionSpec": ATTENTION,
    "HiSparseHotSpec": {"block_size": 16, "page_size": 1024, "blocks_per_request": 2},
    "HiSparseResidentSpec": {"block_size": 16, "page_size": 1024},
}
"""One spec of each kind that a layer can have; blocks of one size in bytes, as vLLM requires for several kinds."""


@dataclass(frozen=True)
class Row:
    """A line of the table in the docs."""

    versions: tuple[str, ...]
    group: str
    page: str


def documented() -> dict[str, Row]:
    rows = re.findall(r"^\| `(\w+)` \| ([\d., ]+) \| ([\w ]+) \| ([\w ]+) \|", PAGE.read_text(), re.MULTILINE)
    return {name: Row(tuple(versions.split(", ")), group, page) for name, versions, group, page in rows}


def classes() -> set[str]:
    """Every spec class of the installed vLLM: those of its interface, and those that any other file makes of them."""
    found = {
        name
        for name, value in vars(kv_cache_interface).items()
        if isinstance(value, type)
        and issubclass(value, KVCacheSpec)
        and value.__module__ == kv_cache_interface.__name__
    }
    bases = "|".join(sorted(found))
    derived = re.compile(rf"^class (\w+)\((?:\w+, *)*(?:{bases})\b", re.MULTILINE)
    for file in Path(vllm.__file__).parent.rglob("*.py"):
        found.update(derived.findall(file.read_text(errors="replace")))
    return found


def spec_of(name: str, **more: Any) -> Any:
    return getattr(kv_cache_interface, name)(**SAMPLES[name] | more)


def here(names: Any) -> list[str]:
    return sorted(name for name in names if hasattr(kv_cache_interface, name))


def writer(name: str) -> Writer:
    """The usual writer of layers with a spec."""
    backend = {"MLAAttentionSpec": "TRITON_MLA", "SlidingWindowMLASpec": "TRITON_MLA"}.get(name, "FLASH_ATTN")
    return Writer(
        {"HiddenStateCacheSpec": "CACHE_ONLY_ATTN"}.get(name, backend), "cuda", "9.0", version=vllm.__version__
    )


def config_of(specs: dict[str, Any]) -> tuple[VllmConfig, KVCacheConfig]:
    """Let vLLM group layers and place them."""
    config = VllmConfig()
    record_kv_cache_layout(config.cache_config, "LBHNC")
    groups = get_kv_cache_groups(config, dict(specs))
    return config, get_kv_cache_config_from_groups(config, groups, 1 << 16)


def worker_of(caches: KVCacheConfig, rank_info: RankInfo = ALONE, cache_dtype: str = "") -> tuple[Any, Geometry]:
    """Let vLLM allocate and view the caches, and describe them."""
    sizes = [group.kv_cache_spec.block_size for group in caches.kv_cache_groups]
    views = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout.LBHNC, sizes)
    names = {
        layer: type(getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer, group.kv_cache_spec)).__name__
        for group in caches.kv_cache_groups
        for layer in group.layer_names
    }
    writers = {layer: replace(writer(name), cache_dtype=cache_dtype) for layer, name in names.items()}
    return views, geometry_of(caches, views, rank_info, writer=writers.__getitem__)


def layers_of(name: str, beside: bool, **more: Any) -> dict[str, Any]:
    layers = {f"model.layers.{index}.{name}": spec_of(name, **more) for index in range(2)}
    if beside:
        layers |= {f"model.layers.{index}.attn": spec_of("FullAttentionSpec") for index in range(2)}
    return layers


PAGES = {
    "by head": lambda page: [{axis.name for axis in part.axes} for part in page] == [{"heads", "tokens", "content"}],
    "by row": lambda page: [[axis.name for axis in part.axes] for part in page] == [["tokens", "content"]],
    "whole": lambda page: [part.name for part in page] == ["whole"],
    "state": lambda page: [part.name for part in page] == ["x", "B", "C", "ssm"],
}


def test_the_table_has_every_spec_of_the_installed_version():
    rows = documented()
    assert classes() == {name for name, row in rows.items() if SERIES in row.versions}
    assert {name for name, row in rows.items() if row.group not in ("base", "each")} == set(SAMPLES)


def test_the_table_says_what_the_code_says():
    rows = documented()
    assert {name: row.group for name, row in rows.items() if row.page not in ("none", "each")} == KINDS
    assert {name for name, row in rows.items() if row.group == "left out"} == NOT_TRANSFERRED
    assert {name for name, row in rows.items() if row.group == "refused"} == set(REFUSED)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside full attention"])
@pytest.mark.parametrize("name", here(KINDS))
def test_what_is_described(name, beside):
    row = documented()[name]
    config, caches = config_of(layers_of(name, beside))
    _, geometry = worker_of(caches, rank_info=RankInfo(state_groups=1))
    mine = [layer for layer in geometry.layers if name in layer.name]
    assert len(mine) == 2
    # Layers that keep every token may share a block table.
    kinds = {geometry.groups[layer.group].kind for layer in mine}
    assert kinds in ({row.group}, {"full"} if beside and row.group == "mla" else {row.group})
    assert all(PAGES[row.page](layer.page.parts) for layer in mine)
    facts = facts_of(config, caches)
    assert facts.transfer_groups == tuple(range(len(geometry.groups)))
    assert facts.has_state == (row.group == "ssm")
    assert facts.backoff == int(row.group not in ("full", "mla"))


def facts_of(config: VllmConfig, caches: KVCacheConfig) -> Any:
    config.kv_transfer_config = KVTransferConfig(kv_connector="KvhmaConnector", kv_role="kv_both", engine_id="e")
    config.model_config = SimpleNamespace(max_model_len=1024, uses_mrope=False)
    return engine_facts(config, caches, Settings())


@pytest.mark.parametrize("name", here(NOT_TRANSFERRED))
def test_what_is_left_out(name):
    """vLLM's runner adds encoder-only groups and HiSparse groups itself; both follow the groups of the grouping."""
    config, caches = config_of(layers_of("FullAttentionSpec", beside=False))
    transferred = name == "EncoderOnlyAttentionSpec"
    group = KVCacheGroupSpec(["model.layers.9.more"], spec_of(name), enable_kv_transfer=transferred)
    groups = [group, *caches.kv_cache_groups]
    with_it = KVCacheConfig(caches.num_blocks, caches.kv_cache_tensors, groups)
    assert transferred_groups(with_it) == (1,)
    _, geometry = worker_of(with_it)
    assert [layer.name for layer in geometry.layers] == caches.kv_cache_groups[0].layer_names
    assert facts_of(config, with_it).transfer_groups == (1,)


@pytest.mark.parametrize("name", here(REFUSED))
def test_what_is_refused(name):
    config, caches = config_of(layers_of(name, beside=True))
    for check in (lambda: worker_of(caches), lambda: facts_of(config, caches)):
        with pytest.raises(UnsupportedPairError, match=rf"model.layers.0.{name}'.*kv_cache_spec is {name}"):
            check()


def test_blocks_in_host_memory_are_refused():
    _, caches = config_of(layers_of("MLAAttentionSpec", beside=False))
    caches.kv_cache_groups[0].host_resident = True
    with pytest.raises(GeometryError, match="group 0: its blocks are host_resident"):
        worker_of(caches)


def test_a_spec_of_a_plug_in_is_not_taken_for_its_base():
    class OwnSpec(kv_cache_interface.FullAttentionSpec):
        pass

    own = OwnSpec(**ATTENTION)
    caches = config_of(layers_of("FullAttentionSpec", beside=False))[1]
    caches.kv_cache_groups[0].kv_cache_spec = own
    with pytest.raises(GeometryError, match="spec is OwnSpec, known are"):
        worker_of(caches)


def memory_of(views: Any) -> np.ndarray:
    storage = next(iter(views.values())).untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage).numpy()


@pytest.mark.parametrize("name", here(["CircularBufferSpec", "KpoolTailSpec"]))
@pytest.mark.parametrize("tp", [1, 2])
def test_a_ring_is_moved_between_equal_engines(name, tp):
    """Its one block moves, for every length of the prompt and for every part that D has already."""
    random = np.random.default_rng(3)
    config = config_of(layers_of(name, beside=True))[1]
    prefill, decode = ([worker_of(config, rank_info=RankInfo(rank, tp)) for rank in range(tp)] for _ in range(2))
    for views, _ in (*prefill, *decode):
        memory = memory_of(views)
        memory[:] = random.integers(0, 256, memory.size, dtype=np.uint8)
    remotes = [geometry for _, geometry in prefill]
    ring = next(index for index, group in enumerate(remotes[0].groups) if group.kind == "ssm")
    for tokens, cached in ((5, 0), (17, 0), (33, 16)):
        here, there = (
            [[ids[0]] if index == ring else ids[1:] for index in range(2)] for ids in ([2, 3, 4, 5], [7, 1, 6, 2])
        )
        entries = [0 if index == ring else cached // 16 for index in range(2)]
        theirs = kvhma.live_spans(remotes[0], tokens, there)
        for rank, (views, local) in enumerate(decode):
            mine = kvhma.live_spans(local, tokens, here, entries)
            transfer = kvhma.plan(local, remotes).transfer(tokens, mine, theirs)
            execute(transfer, local, memory_of(views), remotes, [memory_of(views) for views, _ in prefill])
            for layer in (f"model.layers.{index}.{name}" for index in range(2)):
                assert torch.equal(views[layer][2].view(torch.int8), prefill[rank][0][layer][7].view(torch.int8))


def test_rings_of_other_sizes_are_refused():
    """One side speculates, so its ring is larger."""
    small, large = (
        worker_of(config_of(layers_of("CircularBufferSpec", beside=True, block_size=block, head_size=256 // block))[1])[
            1
        ]
        for block in (8, 16)
    )
    with pytest.raises(UnsupportedPairError, match=r"content cannot be paired.*H2N16C16.*H2N8C32"):
        kvhma.plan(small, large)


def test_modes_with_one_number_have_two_names():
    """In vLLM 0.33 the mode of plug-ins has the number of another mode."""
    aliased = [
        member for member in KVQuantMode if sum(other is member for other in KVQuantMode.__members__.values()) > 1
    ]
    assert [member.name for member in aliased] == (["OCTAVE_K3V4"] if SERIES == "0.33" else [])
    for mode in aliased:
        spec = spec_of("FullAttentionSpec", kv_quant_mode=mode)
        own = [Writer("FLASH_ATTN", cache_dtype=kind) for kind in ("octave_k3v4", "a_plug_in_s")]
        assert len({encoding_of(spec, "uint8", writer) for writer in own}) == 2
        with pytest.raises(
            GeometryError, match=r"kv_quant_mode is 12, which is octave_k3v4\|custom, and no cache type"
        ):
            encoding_of(spec, "uint8", Writer())


@pytest.mark.skipif(SERIES != "0.33", reason="no two modes have one number")
def test_engines_whose_formats_have_one_number_are_no_pair():
    """Both pages are as long, and their bytes have different meanings."""
    layers = layers_of("FullAttentionSpec", beside=False, dtype=torch.uint8, kv_quant_mode=KVQuantMode.OCTAVE_K3V4)
    _, caches = config_of(layers)
    octave, plug_in = (worker_of(caches, cache_dtype=kind)[1] for kind in ("octave_k3v4", "a_plug_in_s"))
    kvhma.plan(octave, [octave])
    with pytest.raises(UnsupportedPairError, match="a_plug_in_s"):
        kvhma.plan(octave, [plug_in])
