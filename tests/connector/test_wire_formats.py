# SPDX-License-Identifier: Apache-2.0
"""The messages between engines of the same protocol version, byte for byte, as recorded.

During a rolling upgrade old and new engines talk to each other: names in the code may change, these bytes may not.
"""

import json

import msgspec
import pytest

from kvhma import Span
from kvhma.errors import HandshakeError, RequestError
from kvhma.vllm.config.identity import ModelIdentity, decode_extra, encode_extra
from kvhma.vllm.options.tickets.messages import AskedTicket, Follow, Progress, Settled, read_params, write_params
from kvhma.vllm.wire.built_layers import BuiltLayer, BuiltLayers
from kvhma.vllm.wire.messages import QUESTIONS as KINDS
from kvhma.vllm.wire.messages import (
    AskEngineInfo,
    AskWorkerIdentity,
    Done,
    EngineInfo,
    Finish,
    Leases,
    LeaseState,
    Outcome,
    Problem,
    Refused,
    Release,
    Renew,
    SignedWorkerIdentity,
    frame,
    frame_length,
    read_answer,
    read_claim,
    read_question,
    write_claim,
)
from kvhma.vllm.wire.params import Address, LeaseClaim, LeaseKey, PrefillParams
from kvhma.vllm.wire.proofs import ProofKey, is_proved, prove, sign_identity, verify_identity
from kvhma.vllm.wire.secrets import Secrets

DIGEST = bytes(range(16))
KEY = bytes(range(32))
CLAIM = LeaseClaim(LeaseKey("cmpl-1", 7), 0x0123456789ABCDEF, DIGEST)
CLAIMS = "a6636c61696d739194a6636d706c2d31c4080000000000000007c4080123456789abcdefc410000102030405060708090a0b0c0d0e0f"
RELEASE = f"83a474797065a772656c65617365{CLAIMS}a76f7574636f6d65"

QUESTIONS = [
    (AskEngineInfo(5), "82a474797065ab656e67696e6520696e666fa870726f746f636f6c05"),
    (
        AskWorkerIdentity(0, 1, DIGEST),
        "84a474797065af776f726b6572206964656e74697479a770705f72616e6b00a774705f72616e6b01"
        f"a56e6f6e6365c410{DIGEST.hex()}",
    ),
    (Renew([write_claim(CLAIM)]), f"82a474797065a572656e6577{CLAIMS}"),
    (
        Renew([write_claim(CLAIM)], KEY, DIGEST),
        f"84a474797065a572656e6577{CLAIMS}aa7265616465725f6b6579c420{KEY.hex()}a56e6f6e6365c410{DIGEST.hex()}",
    ),
    (
        Finish([write_claim(CLAIM)], [Outcome.READ]),
        f"83a474797065a666696e697368{CLAIMS}a86f7574636f6d657391a472656164",
    ),
    (Release([write_claim(CLAIM)], Outcome.READ), f"{RELEASE}a472656164"),
    (Release([write_claim(CLAIM)], Outcome.READ_SHARED), f"{RELEASE}af72656164206279207369626c696e67"),
    (Release([write_claim(CLAIM)], Outcome.UNREAD), f"{RELEASE}a6756e72656164"),
    (
        Follow([AskedTicket(DIGEST, 1, 2, 3)], 5.0),
        f"83a474797065a6666f6c6c6f77a77469636b6574739194c410{DIGEST.hex()}010203"
        "b06d61785f776169745f7365636f6e6473cb4014000000000000",
    ),
    (Refused("engine", "no"), "83a474797065a772656675736564a9656e67696e655f6964a6656e67696e65a474657874a26e6f"),
]

ANSWERS = [
    (
        EngineInfo(5, "engine", (258).to_bytes(8, "big"), [(0, 0), (0, 1)], ("p", 5600)),
        "86a474797065ab656e67696e6520696e666fa870726f746f636f6c05a9656e67696e655f6964a6656e67696e65"
        "ae696e6361726e6174696f6e5f6964c4080000000000000102a572616e6b7392920000920001aa6164766572746973656492a170cd15e0",
    ),
    (
        SignedWorkerIdentity(b"\0\xff", bytes(range(32)), bytes(64)),
        "84a474797065af776f726b6572206964656e74697479a464617461c40200ff"
        f"aa656e67696e655f6b6579c420{KEY.hex()}a97369676e6174757265c440{'00' * 64}",
    ),
    (
        Leases([LeaseState.HELD], DIGEST),
        f"83a474797065a66c6561736573a673746174657391a468656c64a570726f6f66c410{DIGEST.hex()}",
    ),
    (
        Leases([LeaseState.HELD, LeaseState.ENDED, LeaseState.OTHER, LeaseState.FULL]),
        "82a474797065a66c6561736573a673746174657394a468656c64a5656e646564a56f74686572a466756c6c",
    ),
    (Done(), "81a474797065a4646f6e65"),
]

PROBLEM = "82a474797065a770726f626c656da474657874a26e6f"


@pytest.mark.parametrize(("question", "recorded"), QUESTIONS, ids=lambda value: str(value)[:40])
def test_questions(question, recorded):
    assert msgspec.msgpack.encode(question).hex() == recorded
    assert read_question(bytes.fromhex(recorded), (*KINDS, Follow)) == question


@pytest.mark.parametrize(("answer", "recorded"), ANSWERS, ids=lambda value: str(value)[:40])
def test_answers(answer, recorded):
    assert msgspec.msgpack.encode(answer).hex() == recorded
    assert read_answer(bytes.fromhex(recorded), type(answer)) == answer


PROGRESS = "83a474797065a870726f6772657373a776657273696f6e03a6706172616d73"
PARAMS = {"remote_port": 5600, "kvhma": {"lease": 30.0, "spans": [[0, "1-2"]]}}
MAP = "82ab72656d6f74655f706f7274cd15e0a56b76686d6182a56c65617365cb403e000000000000a57370616e73919200a3312d32"


def test_progress_with_blocks():
    progress = Progress(1, "p", epoch=1, tokens=64, blocks=[Settled(0, 2, "3-4")])
    recorded = (
        "86a474797065a870726f6772657373a776657273696f6e01a9656e67696e655f6964a170a565706f636801a6746f6b656e7340"
        "a6626c6f636b7391930002a3332d34"
    )
    assert msgspec.msgpack.encode(progress).hex() == recorded
    assert msgspec.msgpack.encode(read_answer(bytes.fromhex(recorded), Progress)).hex() == recorded


def test_progress_with_the_parameters_of_a_request():
    assert msgspec.msgpack.encode(Progress(3, params=write_params(PARAMS))).hex() == PROGRESS + MAP
    answer = read_answer(bytes.fromhex(PROGRESS + MAP), Progress)
    assert isinstance(answer, Progress)
    assert read_params(answer.params) == PARAMS


HOSTILE = [
    # Hashes of tuples have no seed, so a peer could make thousands of keys collide.
    pytest.param(msgspec.Raw(bytes.fromhex("81a161" + "81" + "920102" + "01")), id="{'a': {[1, 2]: 1}}"),
    {"a": {"b": {}}},
    {"a": [[[]]]},
    {"a": [[1] * 9]},
    {"a": b"b"},
    {str(key): 1 for key in range(65)},
]


@pytest.mark.parametrize("params", [b'{"remote_port": 5600}', [], None, 7, {7: 7}, "text", *HOSTILE], ids=str)
def test_progress_with_other_parameters_is_an_answer_and_they_are_refused(params):
    """The error is of the request, so D does not ask again."""
    answer = read_answer(msgspec.msgpack.encode(Progress(3, params=params)), Progress)
    assert isinstance(answer, Progress)
    assert answer.params, "it is over"
    with pytest.raises(RequestError, match="P's parameters are not a map"):
        read_params(answer.params)


def test_a_problem():
    assert msgspec.msgpack.encode(Problem("no")).hex() == PROBLEM


def test_a_claim():
    assert read_claim(("cmpl-1", bytes([0] * 7 + [7]), bytes.fromhex("0123456789abcdef"), DIGEST)) == CLAIM


def test_a_frame():
    assert frame(Done()).hex() == "0b00000081a474797065a4646f6e65"
    assert frame_length(bytes.fromhex("01020304")) == 0x04030201


def test_a_signed_hello():
    # By OpenSSL: `openssl pkeyutl -sign -rawin` of `kvhma-hello-3`, the nonce, the engine's key and BLAKE2b of the
    # data, with the key of RFC 8032's first test.
    private = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    signature = bytes.fromhex(
        "c584ffd4791a0a67d3a40931e15a46e9c6e8201f236b9c9274d06ec911ed2f49e91da88a4f271604dd11844310305206a7113999d7646b63790dc04927b32304"
    )
    assert sign_identity(private, DIGEST, KEY, b"hello") == signature
    assert verify_identity(public, DIGEST, KEY, b"hello", signature)
    assert not verify_identity(public, DIGEST, KEY, b"hellp", signature)
    assert not verify_identity(public, DIGEST, bytes(32), b"hello", signature)
    assert not verify_identity(public, bytes(16), KEY, b"hello", signature)
    assert not verify_identity(bytes(32), DIGEST, KEY, b"hello", signature)
    assert not verify_identity(b"", DIGEST, KEY, b"hello", b"")


def test_a_proved_answer():
    engine, reader, stranger = ProofKey(), ProofKey(), ProofKey()
    shared = engine.shared(reader.public)
    assert shared == reader.shared(engine.public) != stranger.shared(engine.public)
    said = DIGEST, [write_claim(CLAIM)]
    proof = prove(shared, *said, Leases([LeaseState.HELD]))
    assert len(proof) == 16
    answer = Leases([LeaseState.HELD], proof)
    assert is_proved(shared, *said, answer)
    assert not is_proved(stranger.shared(reader.public), *said, answer)
    assert not is_proved(shared, bytes(16), said[1], answer)
    other = LeaseClaim(CLAIM.key, CLAIM.reader + 1, DIGEST)
    assert not is_proved(shared, DIGEST, [write_claim(other)], answer)
    assert not is_proved(shared, *said, Leases([LeaseState.ENDED], proof))
    assert not is_proved(shared, *said, Leases([LeaseState.HELD]))
    # It also proves the content of the blocks.
    assert not is_proved(shared, *said, Leases([LeaseState.HELD], proof, [b"sums"]))
    summed = prove(shared, *said, Leases([LeaseState.HELD], None, [b"sums"]))
    assert is_proved(shared, *said, Leases([LeaseState.HELD], summed, [b"sums"]))
    assert not is_proved(shared, *said, Leases([LeaseState.HELD], summed, [b"Sums"]))
    assert not is_proved(shared, *said, Leases([LeaseState.HELD], summed))
    with pytest.raises(HandshakeError, match="no X25519 key"):
        engine.shared(bytes(32))


def test_parameters_of_a_request():
    told = PrefillParams(
        address=Address("prefill-0", 5600),
        engine_id="engine_dp0",
        incarnation_id=0x0123456789ABCDEF,
        lease_key=LeaseKey("cmpl-1", 7),
        lease=30.0,
        num_tokens=300,
        prompt="0f" * 16,
        spans=(Span(0, [10, 9, 8, 7, 30, 31, 32]), Span(5, [4]), Span(0, [])),
        tp_size=2,
        pp_size=1,
    )
    recorded = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine_dp0",
        "remote_request_id": "cmpl-1",
        "remote_host": "prefill-0",
        "remote_port": 5600,
        "remote_block_ids": [[], [], []],
        "remote_num_tokens": 300,
        "remote_blocks_expiry_time": None,
        "tp_size": 2,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_mode": "pull",
        "kvhma": {
            "signed": False,
            # By `b2sum -l 128` of the text.
            "digest": "1dbd1bd9d05fbbd01eb6a00b1aa8060b",
            "text": '{"version":4,"spans":[[0,"10-7,30-32"],[5,"4"],[0,""]],"engine_id":"engine_dp0",'
            '"instance":81985529216486895,"lease_key":["cmpl-1",7],"lease":30.0,"tokens":300,'
            '"prompt":"0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f","tp_size":2,"pp_size":1}',
        },
    }
    params, digest = told.to_params(Secrets())
    assert json.dumps(params) == json.dumps(recorded)
    assert digest.hex() == recorded["kvhma"]["digest"]
    read = PrefillParams.from_params(recorded, Secrets(), num_prompt_tokens=300)
    spans = tuple(Span(span.first, span.ids.tolist()) for span in read.spans)
    assert read._replace(spans=spans) == told._replace(digest=digest)


def test_what_an_engine_adds_to_its_hello():
    identity = ModelIdentity(
        model="m",
        revision="r",
        model_id=None,
        dtype="bfloat16",
        quantization=None,
        cache_dtype="auto",
        overrides="{}",
        draft=None,
        config={"hidden_act": '"silu"'},
        versions="vllm 0.32.0, transformers 5.19.0",
        layers=BuiltLayers([BuiltLayer({"scale": 0.5, "switch": True}, {"table": [[1.0, 0.0]]})], {"layer": 0}),
        weights="0123456789abcdef" * 4,
    )
    recorded = (
        b'{"model":{"model":"m","revision":"r","model_id":null,"dtype":"bfloat16","quantization":null,'
        b'"cache_dtype":"auto","overrides":"{}","draft":null,"config":{"hidden_act":"\\"silu\\""},'
        b'"versions":"vllm 0.32.0, transformers 5.19.0",'
        b'"layers":{"kinds":[{"scalars":{"scale":0.5,"switch":true},"tables":{"table":[[1.0,0.0]]}}],'
        b'"layers":{"layer":0}},"weights":"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",'
        b'"draft_weights":null,"draft_config":{}},"vllm":"0.32.0","kvhma":"0.1.0"}'
    )
    found = decode_extra(recorded)
    assert (found.model, found.vllm) == (identity, "0.32.0")
    assert encode_extra(identity, vllm="0.32.0").rpartition(b',"kvhma":')[0] == recorded.rpartition(b',"kvhma":')[0]
    assert encode_extra(identity, vllm="0.32.0", place=3).endswith(b'"place":3}')
    assert decode_extra(recorded[:-1] + b',"place":3}').place == 3
    assert decode_extra(recorded).place is None
