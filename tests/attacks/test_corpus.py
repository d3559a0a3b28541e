# SPDX-License-Identifier: Apache-2.0
"""Inputs that fuzzing found, and extreme inputs: each is refused with a KvhmaError or works, fast and in little memory.

``*.bytes`` is what Geometry.from_json reads. ``*.json`` is a request: two sides, spans ``[first, ids]`` and, where it
once failed, how (``was``) and sometimes what is right (``bytes``). The fuzz targets print requests in this form.
Each runs in a separate process: in this one, memory that an earlier case has used would hide what a case needs.
"""

import contextlib
import json
import re
from pathlib import Path

import pytest

import kvhma
from kvhma import Geometry, KvhmaError, Span
from support.limits import cost_of

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 3  # of the processor, for the few steps of a case; each may take 1
MEGABYTES = 512


def bounded(function, path):
    cost = cost_of(function, path)
    assert cost.seconds < SECONDS
    assert cost.megabytes < MEGABYTES


def read(form):
    return Geometry.from_json(json.dumps(form))


def spans(pairs):
    return [Span(first, ids) for first, ids in pairs]


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.bytes")), ids=lambda path: path.stem)
def test_geometry(path):
    bounded(geometry, path)


def geometry(path):
    refused = ""
    try:
        read_back = Geometry.from_json(path.read_bytes())
    except KvhmaError as error:
        refused = str(error)
    if refused:
        # It is written to logs, and the input may be a peer's.
        assert len(refused) < 2000
        assert not re.search(r"[\x00-\x1f\x7f]", refused)
        return
    assert Geometry.from_json(read_back.to_json()) == read_back
    assert not [finding for finding in kvhma.validate(read_back, read_back) if finding.code != "no-common-layer"]
    with contextlib.suppress(KvhmaError):
        kvhma.plan(read_back, read_back)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_request(path):
    bounded(request, path)


def request(path):
    case = json.loads(path.read_bytes())
    try:
        local, remotes = read(case["local"]), [read(form) for form in case["remotes"]]
    except KvhmaError:
        return
    for remote in remotes:
        texts = [kvhma.validate(local, remote), kvhma.validate(remote, local)]
        assert [finding.text for finding in texts[0]] == [finding.text for finding in texts[1]]
    mine, theirs = spans(case["local_spans"]), [spans(pairs) for pairs in case["remote_spans"]]
    with contextlib.suppress(KvhmaError):
        kvhma.live_spans(local, case["num_tokens"], [span.ids for span in mine])
    try:
        plan = kvhma.plan(local, remotes, descriptor_bytes=case["descriptor_bytes"])
    except KvhmaError:
        return
    moved = {case["bytes"]} if "bytes" in case else set()
    for move in (plan.transfer, plan.ids):
        with contextlib.suppress(KvhmaError):
            transfer = move(case["num_tokens"], mine, theirs)
            moved.add(transfer.bytes - transfer.excess_bytes)
    assert len(moved) <= 1  # descriptors and ids move the same tokens
