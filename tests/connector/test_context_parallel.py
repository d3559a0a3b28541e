# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the tokens of a cache, on P and on D, equal or not, without a forward pass: CPUs have none for them.

`support.parallel` lists what comes from vLLM: everything but the bytes.
"""

import ast
import inspect
import itertools
import json
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.worker import block_table

import kvhma
from connector.test_geometry import full, sliding, worker
from connector.test_pipeline import all_free, hand_over
from kvhma.errors import UnsupportedPairError
from kvhma.vllm.caches.layer_parts import RankInfo
from kvhma.vllm.config.engine_config import rank_info_of
from support.cache.engine import own_config_of
from support.parallel import Engine, Model, OfRunnerV2, Split, prompt, slots, starting

MLA = Model(("mla",) * 3)
ONE_HEAD = Model(("full",) * 2, heads=1)
TWO_HEADS = Model(("full",) * 2, heads=2)
DRAFT = Model(("mla", "mla", "draft"), heads=4)
DRAFT_WINDOW = Model(("mla", "mla", "draft window"), heads=4)
DRAFT_MLA = Model(("mla", "mla", "draft mla"))
HYBRID = Model(("state", "full", "state", "full"), heads=1)


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with starting() as make:
        yield make


KERNEL = """
import json, sys, torch, triton
import triton.language as tl

@triton.jit
{source}

for block, size, rank, turn, tokens, table in json.load(sys.stdin):
    found = torch.zeros(tokens, dtype=torch.int64)
    given = dict(
        num_tokens=tokens,
        max_num_tokens=tokens,
        query_start_loc_ptr=torch.tensor([0, tokens], dtype=torch.int32),
        positions_ptr=torch.arange(tokens),
        block_table_ptr=torch.tensor(table, dtype=torch.int32),
        block_table_stride=len(table),
        slot_mapping_ptr=found,
        KV_CACHE_BLOCK_SIZE=block,
        TOTAL_CP_WORLD_SIZE=size,
        TOTAL_CP_RANK=rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=turn,
        PAD_ID=-1,
        BLOCK_SIZE=64,
        # vLLM 0.31 splits into kernel blocks here.
        block_size=block,
        BLOCKS_PER_KV_BLOCK=1,
    )
    kernel[(2,)](**{{name: given[name] for name in kernel.arg_names}})
    print(json.dumps(found.tolist()))
"""


def interpreted(script, cases):
    """What a kernel prints of each case, run by Triton's interpreter."""
    run = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(cases),
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "HOME": str(script.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_tokens_are_where_vllms_kernel_puts_them(tmp_path):
    """The rule that places bytes in these tests, against vLLM's kernel, run by Triton's interpreter."""
    pytest.importorskip("triton", reason="needs triton; make connector runs it")
    tree = ast.parse(inspect.getsource(block_table))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    (kernel,) = [one for one in functions if "CP_KV_CACHE_INTERLEAVE_SIZE" in [arg.arg for arg in one.args.args]]
    kernel.name, kernel.decorator_list = "kernel", []
    script = tmp_path / "kernel.py"
    script.write_text(textwrap.dedent(KERNEL).format(source=ast.unparse(kernel)))
    cases = [
        (block, size, rank, turn, 130, np.random.default_rng(block + rank).permutation(200).tolist())
        for block, size, turn in itertools.product((16, 32), (1, 2, 3, 4), (1, 2, 16))
        for rank in range(size)
        if block % turn == 0
    ]
    for (block, size, rank, turn, tokens, table), line in zip(cases, interpreted(script, cases), strict=True):
        assert slots(np.arange(tokens), table, block, (size, rank, turn)).tolist() == json.loads(line)


OF_GROUPS = """
import json, sys, torch, triton
import triton.language as tl

@triton.jit
{load}

@triton.jit
{source}

for block, size, rank, turn, tokens, tables in json.load(sys.stdin):
    groups = len(tables)
    found = torch.zeros((groups, tokens), dtype=torch.int64)
    rows = [torch.tensor([table], dtype=torch.int32) for table in tables]

    given = dict(
        max_num_tokens=tokens,
        idx_mapping=torch.tensor([0], dtype=torch.int32),
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        pos=torch.arange(tokens),
        block_table_ptrs=torch.tensor([row.data_ptr() for row in rows], dtype=torch.uint64),
        block_table_strides=torch.tensor([row.stride(0) for row in rows]),

        block_sizes=torch.tensor([block] * groups, dtype=torch.int32),
        kernel_block_sizes=torch.tensor([block] * groups, dtype=torch.int32),
        slot_mapping_enabled=torch.tensor([True] * groups),
        dcp_sharded=torch.tensor([True, False]),
        slot_mappings_ptr=found,
        slot_mappings_stride=found.stride(0),
        cp_rank=rank,
        CP_SIZE=size,
        CP_INTERLEAVE=turn,
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=64,
    )
    kernel[(groups, 2)](**{{name: given[name] for name in kernel.arg_names}})
    print(json.dumps(found.tolist()))
"""


def test_a_draft_that_keeps_every_token_is_written_so(tmp_path):
    """Model Runner V2 asks each group's spec, `dcp_sharded`; the geometry of a group is made from the same spec."""
    pytest.importorskip("triton", reason="needs triton; make connector runs it")
    from vllm.v1.worker.gpu import block_table as groups_table

    tree = ast.parse(inspect.getsource(groups_table))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    helper = getattr(groups_table._load_ptr, "fn", groups_table._load_ptr)  # without Triton's decorator
    load: Any = ast.parse(inspect.getsource(helper)).body[0]
    kernel = functions["_compute_slot_mappings_kernel"]
    kernel.name, kernel.decorator_list, load.decorator_list = "kernel", [], []
    script = tmp_path / "kernel.py"
    script.write_text(textwrap.dedent(OF_GROUPS).format(source=ast.unparse(kernel), load=ast.unparse(load)))
    tables = [np.random.default_rng(seed).permutation(200).tolist() for seed in (1, 2)]
    cases = [(16, size, rank, turn, 130, tables) for size in (2, 4) for rank in range(size) for turn in (1, 16)]
    for (block, size, rank, turn, tokens, _), line in zip(cases, interpreted(script, cases), strict=True):
        shared, whole = (
            slots(np.arange(tokens), table, block, of).tolist()
            for table, of in zip(tables, ((size, rank, turn), (1, 0, 1)), strict=True)
        )
        assert json.loads(line) == [shared, whole]


PAIRS = {
    "latents, 1 to 2": (MLA, Split(), Split(tp=2, dcp=2)),
    "latents, 2 to 1": (MLA, Split(tp=2, dcp=2), Split()),
    "latents, 2 to 4": (MLA, Split(tp=2, dcp=2), Split(tp=4, dcp=4)),
    "latents, 4 to 2 of 4": (MLA, Split(tp=4, dcp=4), Split(tp=4, dcp=2)),
    "latents, 2 to 3": (MLA, Split(tp=2, dcp=2), Split(tp=3, dcp=3)),
    "latents, by token to by block": (MLA, Split(tp=2, dcp=2), Split(tp=2, dcp=2, interleave=16)),
    "latents, by block 1 to 2": (MLA, Split(), Split(tp=2, dcp=2, interleave=16)),
    "latents, by 4 to by 2": (
        MLA,
        Split(tp=2, dcp=2, interleave=4, block=32),
        Split(tp=4, dcp=4, interleave=2, block=32, kernel=8),
    ),
    "latents, equal with other blocks": (MLA, Split(tp=2, dcp=2, block=32), Split(tp=2, dcp=2, block=64, kernel=32)),
    "one head, 1 to 2": (ONE_HEAD, Split(), Split(tp=2, dcp=2)),
    "one head, 2 of 4 to 4": (ONE_HEAD, Split(tp=4, dcp=2), Split(tp=4, dcp=4)),
    "two heads, 2 of 4 to 1": (TWO_HEADS, Split(tp=4, dcp=2), Split()),
    "two heads, 1 of 4 to 2 of 4": (TWO_HEADS, Split(tp=4), Split(tp=4, dcp=2)),
    "two heads, 2 of 4 to 1 of 4": (TWO_HEADS, Split(tp=4, dcp=2), Split(tp=4)),
    "two heads, 2 of 4 to 1 of 2": (TWO_HEADS, Split(tp=4, dcp=2, order="LBNHC"), Split(tp=2, block=32)),
    # States are whole on every rank, so both sides need as many ranks.
    "states, 1 of 2 to 2": (HYBRID, Split(tp=2, block=32), Split(tp=2, dcp=2, block=32)),
    "states, 2 to 2": (HYBRID, Split(tp=2, dcp=2, block=32), Split(tp=2, dcp=2, block=32)),
    # A draft model without context parallelism: each rank has all of its tokens.
    "draft, 1 to 2": (DRAFT, Split(), Split(tp=2, dcp=2)),
    "draft, 2 to 1": (DRAFT, Split(tp=2, dcp=2), Split()),
    "draft, 2 to 4": (DRAFT, Split(tp=2, dcp=2), Split(tp=4, dcp=4)),
    "draft, 4 to 2 of 4": (DRAFT, Split(tp=4, dcp=4), Split(tp=4, dcp=2)),
    "draft, 2 to 2 with other blocks": (DRAFT, Split(tp=2, dcp=2, block=32), Split(tp=2, dcp=2, block=64, kernel=32)),
    "draft with a window, 2 to 4": (DRAFT_WINDOW, Split(tp=2, dcp=2), Split(tp=4, dcp=4)),
    "draft of latents, 2 to 1": (DRAFT_MLA, Split(tp=2, dcp=2), Split()),
    "latents and stages": (MLA, Split(pp=2, tp=2, dcp=2), Split(pp=3)),
    "latents and stages, 2 to 2": (MLA, Split(pp=2, tp=2), Split(pp=2, tp=2, dcp=2, layers=(1, 2))),
    # Ranks that have only prefill context parallelism each hold every token.
    "prefill ranks, 2 to 1": (MLA, Split(pcp=2), Split()),
    "prefill ranks, 1 to 2": (MLA, Split(), Split(pcp=2)),
    "prefill ranks that share, 2 to 1": (MLA, Split(pcp=2, dcp=2), Split()),
    "prefill ranks that share, 4 to 2": (MLA, Split(pcp=2, tp=2, dcp=4), Split(tp=2, dcp=2)),
    "prefill ranks that share, 2 to 2 of 4": (MLA, Split(tp=2, dcp=2), Split(pcp=2, tp=2, dcp=2)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_ranks(start, pair):
    model, of_p, of_d = PAIRS[pair]
    p, d = start("p", model, of_p), start("d", model, of_d)
    for number, length in enumerate((1, 17, 230)):
        hand_over(p, d, f"r{number}", prompt(number, length))
    if "state" not in model.layers:
        d.add("alone", prompt(3, 170), 1)
        d.run("alone")
        hand_over(p, d, "again", prompt(3, 170) + prompt(4, 70))
        specs = [group.kv_cache_spec for group in d.layouts[0].kv_cache_groups]
        hit = max(spec.block_size * (of_d.dcp if spec.dcp_sharded else 1) for spec in specs)
        assert d.loads[-1].cached == 170 // hit * hit

    all_free(p, d)


def test_equal_ranks_read_whole_blocks_each_from_one(start):
    """Not token by token: neighbouring tokens of the blocks are not neighbours in the sequence, on both sides."""
    split = Split(tp=2, dcp=2)
    p, d = start("p", MLA, split), start("d", MLA, split)
    hand_over(p, d, "r", prompt(1, 320))
    d.step()
    assert [worker.sources() for worker in d.workers] == [{0}, {1}]
    blocks = 320 // 32
    assert d.stats.data["rank_descriptors"]["0"] <= blocks * len(MLA.layers)


def test_states_with_prefix_caching_are_refused(monkeypatch):
    config = Engine._config

    def cached(self):
        made = config(self)
        made.cache_config.enable_prefix_caching = True
        return made

    monkeypatch.setattr(Engine, "_config", cached)
    with pytest.raises(
        UnsupportedPairError, match="_size is 2 and enable_prefix_caching is True, with recurrent states"
    ):
        Engine("d", HYBRID, Split(tp=2, dcp=2, block=32))


def test_windows_are_refused():
    place = RankInfo(1, 2, cp_rank=1, cp_size=2)
    with pytest.raises(UnsupportedPairError, match="group 0: decode_context_parallel_size is 2, in a sliding group"):
        worker([sliding()], rank_info=place)


def test_what_tokens_cannot_cut_needs_equal_turns():
    """Pages that are packed for a CPU, and those of an unknown format."""

    def side(size, turn):
        place = RankInfo(0, 4, cp_rank=0, cp_size=size, cp_interleave=turn)
        return worker([full(heads=1)], rank_info=place, cpu_kernel="amx")

    kvhma.plan(side(2, 1), side(2, 1))
    kvhma.plan(side(4, 16), side(2, 16))
    for one, other in itertools.permutations([(2, 1), (2, 4), (4, 1), (2, 16)], 2):
        with pytest.raises(UnsupportedPairError, match="cp_interleave"):
            kvhma.plan(side(*one), side(*other))


@pytest.mark.parametrize(("pcp", "dcp"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 8)])
def test_a_worker_knows_its_place_as_vllm_does(monkeypatch, pcp, dcp):
    """vLLM's own groups of ranks, without starting their processes."""
    tp, pp = 4, 2
    shared = {}

    def group(ranks, *of, group_name=None, **more):
        if group_name == "dcp":
            shared.update({rank: at for one in ranks for at, rank in enumerate(one)})
        return SimpleNamespace(rank_in_group=0, world_size=1)

    world = SimpleNamespace(local_rank=0, device_group=None, rank_in_group=0)
    for name, value in vars(parallel_state).items():
        if re.fullmatch(r"_[A-Z_]+", name) and isinstance(value, (parallel_state.GroupCoordinator, type(None))):
            monkeypatch.setattr(parallel_state, name, None)
    monkeypatch.setattr(parallel_state, "init_model_parallel_group", group)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *of: tp * pp * pcp)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *of: 0)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda *of: "gloo")
    with set_current_vllm_config(own_config_of("p")):
        parallel_state.initialize_model_parallel(tp, pp, pcp, decode_context_model_parallel_size=dcp)
    assert len(shared) == tp * pp * pcp
    for rank, at in shared.items():
        parallel = SimpleNamespace(
            rank=rank,
            tensor_parallel_size=tp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            cp_kv_cache_interleave_size=1,
        )
        place = rank_info_of(
            SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(hf_text_config=None))
        )
        assert (place.cp_rank, place.cp_size) == (at, dcp)


def test_a_runner_that_shares_every_cache_may_not_be_told_otherwise(monkeypatch):
    """Model Runner V1 maps the tokens of each group alike; the plan, made from the specs, would read other tokens."""
    assert isinstance(VllmConfig.use_v2_model_runner, property), "which engine_config asks"
    monkeypatch.setattr(OfRunnerV2, "use_v2_model_runner", False)
    with pytest.raises(UnsupportedPairError, match=r"_size is 2 and dcp_sharded of a .*Spec is False.*VLLM_USE_V2"):
        Engine("d", DRAFT, Split(tp=2, dcp=2))
    Engine("d", DRAFT, Split(tp=2)).close()
    Engine("d", MLA, Split(tp=2, dcp=2)).close()
