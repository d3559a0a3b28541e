# SPDX-License-Identifier: Apache-2.0
"""An engine traces its requests: the file says which prompts share caches, and nothing of what is in them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvhma.errors import SettingsError
from kvhma.replay.columns import BLOCK_TOKENS, Trace
from kvhma.replay.traces import read_trace
from kvhma.vllm.config.settings import Settings
from support.schedulers import request, scheduler, tables


def prompts() -> list[Request]:
    """Requests whose prompts share beginnings, or only tokens."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    tokens = list(range(300))
    other = [*tokens[:150], 7, *tokens[151:]]

    def made(ids: list[int], **more: Any) -> Request:
        return Request(f"r{len(ids)}", ids, SamplingParams(max_tokens=4), None, block_hasher=hasher, **more)

    adapter = {"lora_request": LoRARequest("l", 1, "/l")}
    salted = {"cache_salt": "s"}
    return [
        made(tokens),
        made(tokens[:200]),
        made(other),
        made(tokens, **salted),
        made(tokens, **adapter),
        made(tokens[:9]),
    ]


def traced(path: Path, *requests: Any, **more: Any) -> Trace:
    engine = scheduler(trace_out=str(path), **more)
    with contextlib.closing(engine):
        for at, each in enumerate(requests):
            each.arrival_time = 1_700_000_000.25 + at
            each._all_token_ids.extend([1] * 3)
            engine.on_request_finished(each, tables(engine))
    return read_trace(path)


def test_identities_are_equal_where_vllms_block_hashes_are(tmp_path: Path) -> None:
    requests = prompts()
    found = traced(tmp_path / "trace", *requests)
    assert found.paths is not None
    assert (found.form, found.seconds.tolist()) == ("kvhma", [0, 1, 2, 3, 4, 5])
    assert found.prompts.tolist() == [300, 200, 300, 300, 300, 9]
    assert found.answers.tolist() == [3] * 6
    hashes = [block for each in requests for block in each.block_hashes[: each.num_prompt_tokens // BLOCK_TOKENS]]
    nodes = found.paths.nodes.tolist()
    assert len(nodes) == len(hashes) == 4 + 3 + 4 + 4 + 4
    for node, block in zip(nodes, hashes, strict=True):
        assert [other == node for other in nodes] == [other == block for other in hashes]


def test_a_trace_has_no_token_and_no_salt(tmp_path: Path) -> None:
    """Two starts of an engine draw two salts; with the operator's they have the same hashes."""
    salt, path = tmp_path / "salt", tmp_path / "trace"
    salt.write_bytes(b"0123456789abcdef\n")
    files = {}
    for name, more in {
        "a": {},
        "b": {},
        "c": {"trace_salt_file": str(salt)},
        "d": {"trace_salt_file": str(salt)},
    }.items():
        traced(tmp_path / name, request("secret-name", tokens=130), **more)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        files[name] = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [list(line) for line in files[name]] == [
            ["kvhma_requests", "block_tokens"],
            ["timestamp", "input_length", "output_length", "hash_ids"],
        ]
        assert "secret" not in (tmp_path / name).read_text()
    assert files["a"] != files["b"]
    assert files["a"] != files["c"] == files["d"]
    path.touch(0o644)
    assert len(traced(path, request(tokens=130))) == 1
    assert len(traced(path, request(tokens=130))) == 2, "another start continues the file"
    assert path.stat().st_mode & 0o777 == 0o600
    odd = request(tokens=130)
    odd._all_token_ids = list(range(1234567, 1234567 + 130))
    traced(path, odd, trace_salt_file=str(salt))
    assert b"0123456789abcdef" not in path.read_bytes()
    assert not [token for token in odd._all_token_ids[:130] if b"%d" % token in path.read_bytes()]


def test_p_and_d_trace_their_requests(tmp_path: Path) -> None:
    """Also one whose blocks P holds for D: the option takes nothing."""
    p = scheduler(trace_out=str(tmp_path / "p"))
    with contextlib.closing(p):
        ended = request(params={"do_remote_decode": True})
        ended.arrival_time = 5.0
        p.on_request_added(ended)
        assert p.on_request_finished(ended, tables(p))["do_remote_prefill"]
    assert read_trace(tmp_path / "p").prompts.tolist() == [40]


def test_a_file_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"short")
    (tmp_path / "link").symlink_to(short)
    for wrong in ({"trace_out": str(tmp_path)}, {"trace_out": "/dev/null"}, {"trace_out": str(tmp_path / "link")}):
        with pytest.raises(SettingsError, match="trace file"):
            scheduler(**wrong)
    with pytest.raises(SettingsError, match="the salt has 5 bytes, expected at least 16"):
        scheduler(trace_out=str(tmp_path / "t"), trace_salt_file=str(short))
    assert Settings.read({"trace_out": "x", "trace_salt_file": "y"}).trace_out == "x"


@pytest.mark.parametrize("error", [None, errno.ENOSPC, errno.EBADF])
def test_a_full_disk_ends_the_trace_and_nothing_else(
    error: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = scheduler(trace_out=str(tmp_path / "trace"))
    with contextlib.closing(engine):
        real, calls = os.write, []

        def full(file: int, data: bytes) -> int:
            calls.append(data)
            if error is None:
                return real(file, data[:5])
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr("kvhma.replay.trace_file.os.write", full)
        for at in range(3):
            ended = request(f"r{at}")
            ended.arrival_time = 1.0
            assert engine.on_request_finished(ended, tables(engine)) is None
    assert len(calls) == 1
    assert caplog.text.count("ends here") == 1
