# SPDX-License-Identifier: Apache-2.0
"""What fuzzing found, and inputs that reach far: each is refused with a KvhmaError or works, soon and in little memory.

``*.bytes`` is what Geometry.from_json reads. ``*.json`` is a request: two sides, spans ``[first, ids]`` and, where it
once failed, how (``was``) and sometimes what is right (``bytes``). The fuzz targets print requests in this form.
"""

import contextlib
import json
import re
import resource
import time
from pathlib import Path

import pytest

import kvhma
from kvhma import Geometry, KvhmaError, Span

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 30  # a bound against hanging, not a measurement
MEGABYTES = 512


@pytest.fixture(autouse=True)
def bounded():
    start, used = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < MEGABYTES << 10


def read(form):
    return Geometry.from_json(json.dumps(form))


def spans(pairs):
    return [Span(first, ids) for first, ids in pairs]


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.bytes")), ids=lambda path: path.stem)
def test_geometry(path):
    refused = ""
    try:
        geometry = Geometry.from_json(path.read_bytes())
    except KvhmaError as error:
        refused = str(error)
    if refused:
        # It goes into logs, and the input may be a peer's.
        assert len(refused) < 2000
        assert not re.search(r"[\x00-\x1f\x7f]", refused)
        return
    assert Geometry.from_json(geometry.to_json()) == geometry
    assert not [finding for finding in kvhma.validate(geometry, geometry) if finding.code != "no-common-layer"]
    with contextlib.suppress(KvhmaError):
        kvhma.plan(geometry, geometry)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_request(path):
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
