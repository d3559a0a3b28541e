# SPDX-License-Identifier: Apache-2.0
"""Multimodal items that only P has seen: D adopts P's items before it looks for blocks. Requests, hashes: vLLM's."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from kvhma.errors import SettingsError
from kvhma.vllm.config.engine_config import check_items
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.options.doors import Rooms, SchedulerDoor
from support.params import with_fields
from support.schedulers import STEP, blocks, output, scheduler, tables, tickets_of
from support.waiting import until

BLOCK = 16
TOKENS = list(range(80))
CAT, DOG = "sha of a cat", "sha of a dog"
SHAPE = "0" * 32


def feature(identifier=CAT, offset=20, length=24, data=None):
    return MultiModalFeatureSpec(data, "image", identifier, PlaceholderRange(offset=offset, length=length))


def asked(name, params, *features, tokens=TOKENS, salt=None, **more):
    init_none_hash(sha256)
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params}, **more)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, list(tokens), sampling, None, mm_features=list(features), block_hasher=hasher, cache_salt=salt)


@pytest.fixture
def p():
    made = scheduler(mm_items="trust_prefill")
    yield made
    made.close()


@pytest.fixture
def d():
    made = scheduler(mm_items="trust_prefill", recompute=False, ranks=1)
    yield made
    made.close()


def handed_over(p, *features, tokens=TOKENS, **more):
    """Have P compute a prompt; return the parameters that a proxy forwards."""
    request = asked("at p", {"do_remote_decode": True}, *features, tokens=tokens, **more)
    p.on_request_added(request)
    request.num_computed_tokens = len(tokens)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    params = p.on_request_finished(request, tables(p))
    assert params is not None
    return json.loads(json.dumps(params))


def hashes(*features, tokens=TOKENS):
    return asked("alone", None, *features, tokens=tokens).block_hashes


@pytest.mark.parametrize(
    "given",
    [[], [feature("a placeholder")], [feature(DOG)], [feature()]],
    ids=["nothing", "a placeholder", "another picture", "the same"],
)
def test_blocks_are_known_by_what_p_has_seen(p, d, given):
    request = asked("r", handed_over(p, feature()), *given)
    d.on_request_added(request)
    assert request.block_hashes == hashes(feature())
    assert [one.identifier for one in request.mm_features] == [CAT]
    assert d.matched_tokens(request, 0) == (80, True)
    d.on_blocks_allocated(request, blocks(d), 80)
    (order,) = d.on_step(STEP).loads
    assert order.remote.items == ()
    d.on_worker_results(output(["r"]))
    assert d.take_stats() is None


def test_another_picture_under_the_same_placeholder(p, d):
    found = []
    for picture in (CAT, DOG):
        request = asked(picture, handed_over(p, feature(picture)), feature("a placeholder"))
        d.on_request_added(request)
        assert d.matched_tokens(request, 0) == (80, True)
        found.append(request.block_hashes)
        assert found[-1] == hashes(feature(picture))
    assert found[0][0] == found[1][0], "before the picture they are equal"
    assert set(found[0][1:]).isdisjoint(found[1][1:])


@pytest.mark.parametrize("what", ["tokens", "salt", "place", "number", "compares", "p compares"])
def test_what_is_not_trusted(p, d, what):
    """D compares tokens, adapter and salt, and the places of items."""
    given, tokens = [feature("a placeholder")], TOKENS
    if what == "tokens":
        tokens = [*TOKENS[:50], 7, *TOKENS[51:]]
    elif what == "place":
        given = [feature("a placeholder", offset=21)]
    elif what == "number":
        given = [feature("one", length=12), feature("two", offset=32, length=12)]
    if what in ("compares", "p compares"):
        compares = p if what == "p compares" else d
        compares.context.rooms = Rooms(SchedulerDoor)
    request = asked("r", handed_over(p, feature()), *given, tokens=tokens, salt="tenant" if what == "salt" else None)
    d.on_request_added(request)
    assert d.matched_tokens(request, 0) == (1, True)
    d.on_blocks_allocated(request, blocks(d), 1)
    assert d.on_step(STEP).refusals["r"].cause == "other_prompt"


@pytest.mark.parametrize("backoff", [0, 1])
@pytest.mark.parametrize("given", [[], [feature("a placeholder", offset=70, length=10)]])
def test_an_item_that_d_would_have_to_compute(p, d, given, backoff):
    """The last token is always computed: vLLM's worker looks for the item there."""
    d.context.engine = replace(d.context.engine, backoff=backoff)
    request = asked("r", handed_over(p, feature(offset=70, length=10)), *given)
    before = list(request.block_hashes)
    d.on_request_added(request)
    assert d.matched_tokens(request, 0) == (1, True)
    d.on_blocks_allocated(request, blocks(d), 1)
    assert "ends with token 80, but only 79 tokens are loaded" in d.on_step(STEP).refusals["r"].text
    assert request.block_hashes == before


def grid(*sizes):
    """What a processor of vLLM makes of a picture, or of embeddings in place of a picture."""
    pixels = MultiModalFieldElem(torch.zeros(3), MultiModalBatchedField())
    sizes = MultiModalFieldElem(torch.tensor(sizes), MultiModalBatchedField(keep_on_cpu=True))
    return MultiModalKwargsItem({"pixel_values": pixels, "image_grid_thw": sizes})


@pytest.mark.parametrize(
    ("at_p", "given", "why"),
    [
        (grid(1, 4, 6), grid(1, 4, 6), ""),
        (grid(1, 4, 6), grid(1, 6, 4), "differs from D's"),
        (grid(1, 4, 6), None, "is unknown"),
        (None, None, "is unknown"),
        (grid(1, 4, 6), [], "the prompt has no items"),
    ],
)
def test_positions_that_depend_on_items(p, d, at_p, given, why):
    """A tall and a wide picture may have as many tokens."""
    for one in (p, d):
        one.context.engine = replace(one.context.engine, positions_depend_on_items=True)
    features = [] if given == [] else [feature("a placeholder", data=given)]
    request = asked("r", handed_over(p, feature(data=at_p)), *features)
    d.on_request_added(request)
    if not why:
        assert d.matched_tokens(request, 0) == (80, True)
    else:
        assert d.matched_tokens(request, 0) == (1, True)
        d.on_blocks_allocated(request, blocks(d), 1)
        text = d.on_step(STEP).refusals["r"].text
        assert why in text
        assert "M-RoPE" in text


@pytest.mark.parametrize("hit", [0, 32, 48])
def test_one_that_is_preempted_is_not_computed_from_its_placeholder(p, d, hit):
    """Unless the prefix cache still has all of the items that only P has seen."""
    request = asked("r", handed_over(p, feature()), feature("a placeholder"))
    d.on_request_added(request)
    assert d.matched_tokens(request, 0) == (80, True)
    d.on_blocks_allocated(request, blocks(d), 80)
    d.on_step(STEP)
    d.on_worker_results(output(["r"]))
    assert d.decode.pending == {}
    found = d.matched_tokens(request, hit)
    if hit == 48:
        assert found == (0, False)
    else:
        assert found == (1, True)
        d.on_blocks_allocated(request, blocks(d), 1)
        assert "only P has seen" in d.on_step(STEP).refusals["r"].text
        d.on_worker_results(output(["r"], ["r"], {}))
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    d.on_request_finished(request, tables(d))
    assert d.context.rooms[-1]._ends == {}


def test_items_of_a_prompt_that_must_not_read_the_cache(p, d):
    request = asked("r", handed_over(p, feature()), feature("a placeholder"), prompt_logprobs=1)
    before = list(request.block_hashes)
    d.on_request_added(request)
    assert d.matched_tokens(request, 0) == (1, True)
    assert not request.skip_reading_prefix_cache, "vLLM asks for no load"
    d.on_blocks_allocated(request, blocks(d), 1)
    assert "but only 0 tokens are loaded" in d.on_step(STEP).refusals["r"].text
    assert request.block_hashes == before


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize(("all_groups", "fails"), [(64, False), (48, False), (32, True)])
def test_what_all_groups_have_is_what_is_not_computed(p, d, loaded, all_groups, fails):
    """VLLM names the hit of full attention. If nothing is loaded then, it begins where the state has a hit too."""
    d.context.engine = replace(d.context.engine, has_state=True)
    d.context.manager.get_computed_blocks = lambda request: (None, all_groups, 0)
    request = asked("r", handed_over(p, feature()), feature("a placeholder"))
    d.on_request_added(request)
    if loaded:
        assert d.matched_tokens(request, 0) == (80, True)
        d.on_blocks_allocated(request, blocks(d), 80)
        d.on_step(STEP)
        d.on_worker_results(output(["r"]))
    assert d.matched_tokens(request, 80) == ((1, True) if fails else (0, False))
    if fails:
        d.on_blocks_allocated(request, blocks(d), 1)
        assert "only P has seen" in d.on_step(STEP).refusals["r"].text


def test_who_computes_what_fails_takes_over_nothing(p):
    """A producer may recompute, and gets parameters of P all the same."""
    d = scheduler(mm_items="trust_prefill", recompute=True, ranks=1)
    try:
        request = asked("r", handed_over(p, feature()), feature("a placeholder"))
        d.on_request_added(request)
        assert d.matched_tokens(request, 0) == (0, False)
        assert request.mm_features[0].identifier == "a placeholder"
    finally:
        d.close()


@pytest.mark.parametrize(
    "items",
    [
        [],
        {},
        [[]],
        [[CAT, "image", 20]],
        [[CAT, "image", 20, 24]],
        [[CAT, "image", 20, 24, "no digest"]],
        [[CAT, "image", -1, 24, SHAPE]],
        [[CAT, "image", 80, 24, SHAPE]],
        [[CAT, "image", 20, 0, SHAPE]],
        [[CAT, "image", 20.5, 24, SHAPE]],
        [["", "image", 20, 24, SHAPE]],
        [["x" * 513, "image", 20, 24, SHAPE]],
        [[CAT, 7, 20, 24, SHAPE]],
        [[CAT, "image", 30, 4, SHAPE], [DOG, "image", 20, 4, SHAPE]],
        [[CAT, "image", 20, 24, SHAPE]] * 4097,
        [[DOG, "image", 20, 24, SHAPE]],
    ],
)
def test_items_that_somebody_has_made_up(p, d, items):
    params = with_fields(handed_over(p, feature()), items=items)
    if items == [[DOG, "image", 20, 24, SHAPE]]:  # right in form, so only the digest shows it
        params["kvhma"]["digest"] = handed_over(p, feature())["kvhma"]["digest"]
    request = asked("r", params, feature("a placeholder"))
    before = list(request.block_hashes)
    d.on_request_added(request)
    assert d.matched_tokens(request, 0) == (1, True)
    d.on_blocks_allocated(request, blocks(d), 1)
    assert d.on_step(STEP).refusals["r"].cause == "refused"
    assert (request.block_hashes, request.mm_features[0].identifier) == (before, "a placeholder")


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both", "kv_producer"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_what_d_was_not_given_it_cannot_compute(role, policy):
    consumes = role != "kv_producer"
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_consumer=consumes, kv_load_failure_policy=policy))
    check_items(config, Settings())
    if consumes and policy == "recompute":
        with pytest.raises(
            SettingsError, match=r"mm_items is 'trust_prefill' and kv_load_failure_policy is 'recompute'"
        ):
            check_items(config, Settings.read({"mm_items": "trust_prefill"}))
    else:
        check_items(config, Settings.read({"mm_items": "trust_prefill"}))


@pytest.mark.parametrize("given", [[], [feature("a placeholder")]])
def test_a_ticket_waits_for_what_p_has_seen(p, d, given):
    """The items come with P's parameters; vLLM then has to look for the blocks again."""
    ticket = "0123456789abcdef" * 2
    at_p = asked("at p", {"do_remote_decode": True, "kvhma_ticket": ticket}, feature())
    p.on_request_added(at_p)
    address = p.context.engine.address
    params = {"do_remote_prefill": True, "kvhma_ticket": ticket, "remote_host": address.host}
    request = asked("r", params | {"remote_port": address.port}, *given)
    d.on_request_added(request)
    until(lambda: d.matched_tokens(request, 0) == (None, False) and tickets_of(d).followed["r"].is_compared_at_hand_off)
    at_p.num_computed_tokens, at_p.status = 80, RequestStatus.FINISHED_LENGTH_CAPPED
    assert p.on_request_finished(at_p, tables(p)) is not None
    found = []
    until(lambda: "r" not in tickets_of(d).followed, lambda: found.append(d.matched_tokens(request, 0)))
    assert found[-1] == (None, False), "vLLM has looked for blocks by the items before"
    assert request.block_hashes == hashes(feature())
    assert d.matched_tokens(request, 0) == (80, True)
