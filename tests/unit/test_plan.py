# SPDX-License-Identifier: Apache-2.0
"""What a plan reports: sources, readers, sentences, findings."""

import dataclasses

import pytest

import kvhma
from kvhma.models import model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.oracle import Oracle


def ranks(name, size, **more):
    # Of any number of ranks, also of numbers with which vLLM starts no engine.
    one = dataclasses.replace(model(name), query_heads=None)
    return [layout(one, LayoutOptions(num_blocks=6, tp_rank=rank, tp_size=size, **more)) for rank in range(size)]


def plans(name, decode, prefill, **more):
    sources = ranks(name, prefill, base=1 << 44, **more)
    return [kvhma.plan(rank, sources) for rank in ranks(name, decode)]


@pytest.mark.parametrize(
    ("name", "decode", "prefill", "sources"),
    [
        ("gemma-3-27b", 2, 2, [[0], [1]]),
        ("gemma-3-27b", 4, 2, [[0], [0], [1], [1]]),
        ("gemma-3-27b", 1, 4, [[0, 1, 2, 3]]),
        # Two KV heads: P's ranks hold a head twice, and each is read from one of them.
        ("Falcon-H1-7B", 1, 1, [[0]]),
        ("DeepSeek-V3", 4, 4, [[0], [1], [2], [3]]),
        ("DeepSeek-V3", 4, 2, [[0], [0], [1], [1]]),
        ("DeepSeek-V3", 1, 4, [[0]]),
        ("granite-4.0-h-tiny", 2, 1, [[0], [0]]),
        ("granite-4.0-h-tiny", 1, 2, [[0, 1]]),
    ],
)
def test_which_sources_a_rank_reads(name, decode, prefill, sources):
    assert [plan.sources for plan in plans(name, decode, prefill)] == sources


def test_explain_names_shards_and_reasons():
    text = plans("granite-4.0-h-tiny", 1, 2, conv="SD")[0].explain()
    assert "Rank 0 of 1 reads from 2 of 2 sources." in text
    assert "B whole; stored as [channels, rows] here and [rows, channels] there." in text
    assert "ssm heads 24..48 of 48: all the source holds, this rank has 0..48." in text
    assert "kv heads 0..2 of 4: all the source holds, this rank has 0..4." in text
    text = plans("DeepSeek-V3", 1, 2)[0].explain()
    assert "Source 1 (rank 1 of 2): nothing" in text


def test_a_layer_of_one_side_is_a_finding():
    whole = layout(model("gpt-oss-20b"), LayoutOptions(num_blocks=6))
    fewer = dataclasses.replace(whole, layers=whole.layers[:-1])
    for local, remote in ((whole, fewer), (fewer, whole)):
        plan = kvhma.plan(local, remote)
        ((source, finding),) = plan.findings
        assert (source, finding.severity, finding.code) == (0, "warning", "one-sided-layer")
        # With a draft model at D alone engines accepted 7 of 114 drafts, with it on both sides 40 of 48. That was so
        # before the plan reported it, and still is.
        assert "begins cold: drafts of such a layer are accepted less often" in finding.text
        assert whole.layers[-1].name in finding.text
    assert "zeroed, not read" in kvhma.plan(whole, fewer).explain()


def test_no_rank_holds_half_of_the_heads():
    half = ranks("gpt-oss-20b", 2)[:1]
    with pytest.raises(kvhma.UnsupportedPairError, match=r'part "kv".*heads 4\.\.8.*no source holds these items'):
        kvhma.plan(ranks("gpt-oss-20b", 1)[0], half)


def test_views_of_a_source_that_is_not_there():
    (plan,) = plans("gpt-oss-20b", 1, 1)
    with pytest.raises(kvhma.RequestError, match="source is 1, there are 1 sources"):
        plan.views(1)


def test_ids_refuse_what_views_cannot_say():
    # Two layers of one group meet kernel blocks of different size: the last block would be cut in two ways.
    def side(tokens, base):
        layers = []
        groups = []
        for index, size in enumerate(tokens):
            groups.append(kvhma.Group("full", 16, ratio=16 // size))
            page = kvhma.Page(
                (kvhma.Part("kv", "uint8", 1, 0, (kvhma.Axis("tokens", size, 4), kvhma.Axis("content", 4, 1))),)
            )
            layers.append(kvhma.Layer(f"l{index}", index, index, 0, 4, 64, page))
        regions = tuple(kvhma.Region(base + 4096 * index, 256) for index in range(2))
        return kvhma.Geometry(regions, tuple(groups), tuple(layers))

    remote = side([16, 8], 1 << 30)
    local = side([16, 16], 1 << 20)
    joined = kvhma.Geometry(
        local.regions, local.groups[:1], tuple(dataclasses.replace(layer, group=0) for layer in local.layers)
    )
    plan = kvhma.plan(joined, remote)
    spans = [kvhma.Span(0, [1])], [kvhma.Span(0, [2]), kvhma.Span(0, [3])]
    assert plan.transfer(5, *spans).bytes in (40, 64)
    with pytest.raises(kvhma.UnsupportedPairError, match="cut a group's first or last block differently"):
        plan.ids(5, *spans)
    assert plan.ids(16, *spans).bytes == plan.transfer(16, *spans).bytes == 128


def test_context_parallel_ranks_that_dropped_different_blocks():
    # Window 4 after 9 tokens: 6, 7 and 8 are needed. Rank 0 of P holds blocks 0, 2, .. and has freed block 0; rank 1
    # still has its first block, tokens 4..8.
    page = kvhma.Page((kvhma.Part("kv", "uint8", 1, 0, (kvhma.Axis("tokens", 4, 8), kvhma.Axis("content", 8, 1))),))

    def rank(base, **parallel):
        group = kvhma.Group("sliding", 4, window=4, **parallel)
        return kvhma.Geometry((kvhma.Region(base, 320),), (group,), (kvhma.Layer("l", 0, 0, 0, 10, 32, page),))

    local = rank(4096)
    sources = [rank((1 + index) << 20, cp_rank=index, cp_size=2) for index in range(2)]
    spans = [kvhma.Span(1, [3, 5])], [[kvhma.Span(1, [2])], [kvhma.Span(0, [4])]]
    transfer = kvhma.plan(local, sources, descriptor_bytes=0).transfer(9, *spans)
    Oracle(local, sources).check(9, *spans, transfer)
    assert [(read.source, read.local[:, :2].tolist()) for read in transfer.reads] == [
        (0, [[4096 + 5 * 32, 8]]),
        (1, [[4096 + 3 * 32, 32]]),
    ]


@pytest.mark.parametrize("smaller", range(3))
def test_spans_are_checked_for_the_source_with_fewer_blocks(smaller):
    """Spans for all sources are checked once for sources of one size, and again for a source of another size."""
    one = dataclasses.replace(model("gemma-3-27b"), query_heads=None)
    sources = [
        layout(one, LayoutOptions(num_blocks=10 if rank == smaller else 20, tp_rank=rank, tp_size=4, base=1 << 44))
        for rank in range(4)
    ]
    local = layout(one, LayoutOptions(num_blocks=20))
    planned = kvhma.plan(local, sources)
    assert len(planned.sources) == 4
    mine, theirs = ([kvhma.Span(0, [first + group]) for group in range(len(local.groups))] for first in (1, 10))
    with pytest.raises(kvhma.errors.BlockIdError, match=r"remote group 0: block id 10 .* outside 0..10"):
        planned.transfer(9, mine, theirs)
    assert planned.transfer(9, mine, mine).bytes
