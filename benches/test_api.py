# SPDX-License-Identifier: Apache-2.0
"""Micro-benchmarks of the Python API, for pytest-benchmark; benches/ratios.py compares with others."""

import random

import numpy as np
import pytest

import kvhma
from kvhma import Span, lowlevel
from kvhma.cli.block_tables import sequence_blocks
from kvhma.models import model
from kvhma.models.vllm_layout import LayoutOptions, layout

MODELS = {"gemma-3-27b": (8192, 2000), "gpt-oss-120b": (131_072, 9000), "NVIDIA-Nemotron-3-Nano-30B-A3B": (131_072, 90)}


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """A plan, and one request with scattered blocks."""
    tokens, blocks = MODELS[request.param]
    sides = [
        layout(model(request.param), LayoutOptions(num_blocks=blocks, kernel_block="flashinfer", base=base))
        for base in (1 << 30, 1 << 45)
    ]
    rng = random.Random(1)
    spans = []
    for side in sides:
        ids = iter(rng.sample(range(1, blocks), blocks - 1))
        tables = sequence_blocks(side, tokens)
        tables = [[next(ids) if block else 0 for block in table.tolist()] for table in tables]
        spans.append(kvhma.live_spans(side, tokens, tables))
    return sides, kvhma.plan(*sides), (tokens, *spans)


def test_plan(benchmark, case):
    benchmark(kvhma.plan, *case[0])


def test_transfer(benchmark, case):
    assert benchmark(case[1].transfer, *case[2]).bytes


def test_ids(benchmark, case):
    assert benchmark(case[1].ids, *case[2]).bytes


def test_geometry_from_json(benchmark, case):
    benchmark(kvhma.Geometry.from_json, case[0][0].to_json())


BLOCKS = list(range(1, 903))
FORMS = pytest.mark.parametrize("ids", [BLOCKS, np.array(BLOCKS, np.int32)], ids=["list", "array"])


@FORMS
def test_clip(benchmark, ids):
    assert len(benchmark(lowlevel.clip_blocks, [ids], [65])[0]) == 65


@FORMS
def test_expand(benchmark, ids):
    assert len(benchmark(lowlevel.expand_blocks, ids, 4)) == 3608


@FORMS
def test_descriptor_ids(benchmark, ids):
    assert len(benchmark(lowlevel.descriptor_ids, [ids], [2000] * 10, [0] * 10)) == 9020


@FORMS
def test_descriptor_order(benchmark, ids):
    order = lowlevel.DescriptorOrder([0], [8000] * 10, [0] * 10, ratios=[4])
    out = np.empty(36080, np.int32)
    assert len(benchmark(order.ids, [ids], out=out)) == 36080


def test_batch_of_requests(benchmark):
    order = lowlevel.DescriptorOrder([0], [2000] * 10, [0] * 10)
    rows, lengths = np.tile(np.array(BLOCKS, np.int32), (64, 1)), np.full(64, 902)
    assert len(benchmark(order.batch_ids, [rows], [lengths])[1]) == 65


def test_spans_of_arrays(benchmark, case):
    tokens, local, remote = case[2]
    arrays = [[Span(span.first, lowlevel.expand_blocks(span.ids, 1)) for span in side] for side in (local, remote)]
    benchmark(case[1].ids, tokens, *arrays)
