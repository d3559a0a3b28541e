# SPDX-License-Identifier: Apache-2.0
"""``kvhma doctor --peer`` and ``kvhma export`` ask another engine as a decode engine does."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvhma import Geometry
from kvhma.cli import doctor, doctor_host
from kvhma.cli.doctor_peer import null_rows
from kvhma.models import models
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.nixl import encode_handshake, key_hash
from kvhma.oracle import cases
from kvhma.vllm.config.identity import encode_extra
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.wire.messages import PROTOCOL
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.proofs import new_agent_key
from kvhma.vllm.wire.secrets import Secrets
from support.cli_run import Done, cli, refused
from support.cluster import geometries
from support.counted import Counted
from support.engines.engine import free_port
from support.identity import EXTRA, IDENTITY
from support.listening import AnyLease, hostile, said
from support.tiny import tiny_hybrid

SECRET = b"sixteen bytes or more"


@contextlib.contextmanager
def engine(
    ranks: list[Geometry],
    *,
    secret: bool = False,
    extras: list[bytes] | None = None,
    advertised: Address | None = None,
    instance: int = 258,
) -> Iterator[str]:
    """The address of an engine's listener, for these caches."""
    address, hellos = Address("127.0.0.1", free_port()), {}
    for rank, geometry in enumerate(ranks):
        private, public = new_agent_key()
        extra = extras[rank] if extras else EXTRA
        name = f"p-{rank}-{key_hash(public)}"
        made = encode_handshake(bytes(100), geometry, name=name, incarnation=rank, extra=extra, public_key=public)
        hellos[0, rank] = made, private
    secrets = Secrets([SECRET] if secret else [])
    of = LocalEngine("p", instance, hellos, advertised)
    listener = Listener(address, of, leases=AnyLease(), secrets=secrets, counters=Counted())
    try:
        yield str(address)
    finally:
        listener.close()


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVHMA_SECRET", raising=False)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    return path


@pytest.fixture
def peer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out all findings about this machine."""
    monkeypatch.setattr(doctor, "look", lambda _: iter(()))


def rows(done: Done) -> dict[str, tuple[str, str]]:
    return {row["name"].removeprefix("peer: "): (row["state"], row["found"]) for row in done.form["checks"]}


# --- doctor ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("peer_only")
@pytest.mark.parametrize("secret", [True, False])
def test_a_peer_is_named(secret: bool, secret_file: Path) -> None:
    with engine(geometries(2, 1 << 30), secret=secret) as address:
        port = address.rpartition(":")[2]
        given = ["--secret-file", secret_file] if secret else []
        done = cli("doctor", "--peer", f"localhost:{port}", "--json", *given)
    found = rows(done)
    assert (done.code, {state for state, _ in found.values()}) == (0, {"ok"})
    assert list(found) == ["name", "port", "engine", "handshake", "model", "geometry"]
    assert found["name"][1].startswith("localhost is 127.0.0.1, ")
    assert ("takes our secret (TLS 1.3)" in found["port"][1]) == secret
    assert found["engine"][1].startswith("p, started as 0000000000000102, tp=2; a question and its answer take ")
    assert found["handshake"][1].startswith("kvhma ")
    assert "vLLM 0.32.0; 2 signed worker identities (" in found["handshake"][1]
    assert found["model"][1] == "org/tiny, revision 0123abc, dtype bfloat16, KV cache bfloat16"
    one = geometries(2, 1 << 30)[0]
    assert found["geometry"][1].startswith(f"{len(one.layers)} layers in {len(one.groups)} groups (kind, block: ")


def address_of(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host, int(port))


@pytest.mark.usefixtures("peer_only")
def test_where_a_peer_sends_decode_engines(tmp_path: Path) -> None:
    """P's own name may lead to another machine here."""
    caches = geometries(1, 1 << 30)
    with engine(caches, instance=1) as other, engine(caches, advertised=address_of(other)) as asked:
        done = cli("doctor", "--peer", asked, "--json")
        assert (done.code, rows(done)["advertised address"][0]) == (1, "failed")
        assert f"p sends decode engines to {other}, which leads from here to engine p" in done.out
        (fix,) = [row["fix"] for row in done.form["checks"] if row["state"] == "failed"]
        assert "advertised_host" in fix
        own = tmp_path / "settings.json"
        own.write_text(json.dumps({"allowed_prefill_engines": [asked]}))
        done = cli("doctor", "--peer", asked, "--settings", own, "--json")
        assert "is not among allowed_prefill_engines" in rows(done)["advertised address"][1]
    with engine(caches, advertised=Address("127.0.0.1", free_port())) as asked:
        done = cli("doctor", "--peer", asked, "--json")
        assert rows(done)["advertised address"][0] == "failed", "no listener is there"
        assert rows(done)["geometry"][0] == "ok", "the rest is looked at all the same"


@pytest.mark.usefixtures("peer_only")
def test_a_peer_at_its_advertised_address() -> None:
    port = free_port()
    at = Address("localhost", port)
    private, public = new_agent_key()
    name = f"p-0-{key_hash(public)}"
    made = encode_handshake(bytes(100), tiny_hybrid(4), name=name, incarnation=0, extra=EXTRA, public_key=public)
    of = LocalEngine("p", 258, {(0, 0): (made, private)}, at)
    listener = Listener(Address("127.0.0.1", port), of, leases=AnyLease(), secrets=Secrets(), counters=Counted())
    with contextlib.closing(listener):
        assert rows(cli("doctor", "--peer", f"127.0.0.1:{port}", "--json"))["advertised address"] == (
            "ok",
            f"p sends decode engines to localhost:{port}, which leads there from here too",
        )
        assert "advertised address" not in rows(cli("doctor", "--peer", str(at), "--json")), "it was asked there"


@pytest.mark.usefixtures("peer_only")
@pytest.mark.parametrize(
    ("theirs", "ours", "text"),
    [
        (True, None, "this engine has a secret, and the question came without"),
        (False, SECRET, "has no secret and this engine has one"),
        (True, b"another one that is long", "differ"),
    ],
)
def test_secrets_that_differ(theirs: bool, ours: bytes | None, text: str, tmp_path: Path) -> None:
    given: list[object] = []
    if ours is not None:
        (tmp_path / "ours").write_bytes(ours)
        given = ["--secret-file", tmp_path / "ours"]
    with engine(geometries(1, 1 << 30), secret=theirs) as address:
        done = cli("doctor", "--peer", address, "--json", *given)
    state, found = rows(done)["peer"]
    assert (done.code, state) == (1, "failed")
    assert text in found
    assert SECRET.decode() not in done.out


@pytest.mark.usefixtures("peer_only")
def test_the_environment_has_the_secret_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHMA_SECRET", SECRET.decode())
    with engine(geometries(1, 1 << 30), secret=True) as address:
        assert rows(cli("doctor", "--peer", address, "--json"))["port"][0] == "ok"


@pytest.mark.usefixtures("peer_only")
def test_a_host_that_may_not_be_read_is_not_even_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))
    (tmp_path / "settings.json").write_text(
        json.dumps(
            {
                "kv_connector": "KvhmaConnector",
                "kv_connector_extra_config": {"allowed_prefill_engines": ["10.0.0.7:5600"]},
            }
        )
    )
    for command in (("doctor", "--json", "--peer"), ("export",)):
        done = cli(*command, "strange.example:5600", "--settings", tmp_path / "settings.json")
        assert done.code == (1 if command[0] == "doctor" else 2)
        assert "strange.example:5600 is not among allowed_prefill_engines" in done.out + done.err


@pytest.mark.usefixtures("peer_only")
def test_settings_of_this_hosts_engine_hold(tmp_path: Path, secret_file: Path) -> None:
    """The command uses the secret and the timeout of D's settings; a wrong setting makes one line."""
    settings = {"secret_file": str(secret_file)}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    with engine(geometries(1, 1 << 30), secret=True) as address:
        assert cli("doctor", "--peer", address, "--settings", tmp_path / "settings.json").code == 0
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"handshake_timeout": 0.2}))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = cli("doctor", "--peer", address, "--settings", tmp_path / "settings.json", "--json")
    assert rows(done)["peer"][1] == f"no answer from {address} in 0.2 s"
    (tmp_path / "settings.json").write_text('{"secret": 1}')
    assert "unknown ['secret']" in refused("doctor", "--peer", address, "--settings", tmp_path / "settings.json")


@pytest.mark.usefixtures("peer_only")
def test_nobody_is_there() -> None:
    done = cli("doctor", "--peer", f"127.0.0.1:{free_port()}", "--json")
    assert rows(done)["peer"][0] == "failed"
    assert "Connection refused" in rows(done)["peer"][1]
    assert "side_channel_host" in done.form["checks"][-1]["fix"]


@pytest.mark.usefixtures("peer_only")
def test_another_version_names_both() -> None:
    def serve(accepted: socket.socket) -> None:
        said(accepted)
        text = f"protocol is {PROTOCOL} on your side, {PROTOCOL + 1} on this side"
        data = msgspec.msgpack.encode({"type": "problem", "text": text})
        accepted.sendall(struct.pack("<I", len(data)) + data)

    with hostile(serve) as address:
        found = rows(cli("doctor", "--peer", address, "--json"))["peer"]
    assert found == ("failed", f"the peer says: protocol is {PROTOCOL} on your side, {PROTOCOL + 1} on this side")


@pytest.mark.usefixtures("peer_only")
def test_an_engine_that_is_not_whole(tmp_path: Path) -> None:
    """Workers with two models, and a server with nonsensical answers."""
    other = encode_extra(msgspec.structs.replace(IDENTITY, dtype="float16"), vllm="0.32.0")
    with engine(geometries(2, 1 << 30), extras=[EXTRA, other]) as address:
        done = cli("doctor", "--peer", address, "--json")
    states = [row["state"] for row in done.form["checks"] if row["name"] == "peer: model"]
    assert (done.code, states) == (1, ["failed", "failed"])
    with hostile(lambda accepted: accepted.sendall(b"\xff" * 64)) as address:
        done = cli("doctor", "--peer", address, "--json")
        assert rows(done)["peer"][0] == "failed"
        with hostile(lambda accepted: accepted.sendall(b"\xff" * 64)) as other_address:
            assert "not one of this protocol" in refused("export", other_address, "-o", tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("text", ["", "host", "host:", ":5600", "host:0", "host:65536", "http://a:1", "u@h:1", "a:1/x"])
def test_an_address_is_host_and_port(text: str) -> None:
    assert "must be HOST:PORT of an engine's side channel" in refused("doctor", "--peer", text)


def test_options_of_a_peer_need_one() -> None:
    assert "are for --peer" in refused("doctor", "--read")
    assert "give HOST:PORT, or --case" in refused("export")


# --- a read ----------------------------------------------------------------------------------------------------------


def bytes_of(geometry: Geometry, null: bool) -> set[int]:
    """The addresses of the items of the null block, or of all others, as docs/geometry.md defines them."""
    found = set()
    for layer in geometry.layers:
        base, ratio = geometry.regions[layer.region].base + layer.offset, geometry.groups[layer.group].ratio
        kernel_stride = layer.kernel_stride or layer.block_stride // ratio
        for block, kernel, part in itertools.product(range(layer.num_blocks), range(ratio), layer.page.parts):
            if (block == geometry.null_block) == null:
                page = base + block * layer.block_stride + kernel * kernel_stride + part.offset
                for index in itertools.product(*(range(axis.length or 0) for axis in part.axes)):
                    item = page + sum(place * axis.stride for place, axis in zip(index, part.axes, strict=True))
                    found.update(range(item, item + part.item_bytes))
    return found


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC"])
def test_nothing_but_null_blocks_is_read(order: str) -> None:
    """Where heads are outside of blocks, other requests' blocks are between those of the null block."""
    known = models()["gemma-3-4b"]
    tiny = replace(known, layers=known.layers[:6], kv_heads=2, head_dim=8, query_heads=None)
    geometry = layout(tiny, LayoutOptions(num_blocks=3, order=order, base=1 << 30))
    read = {byte for address, length, _ in null_rows(geometry).tolist() for byte in range(address, address + length)}
    assert read
    assert read <= bytes_of(geometry, null=True)
    assert not read & bytes_of(geometry, null=False)
    assert len(null_rows(replace(geometry, null_block=None))) == 0


@pytest.mark.nixl
@pytest.mark.usefixtures("peer_only")
@pytest.mark.parametrize("board", ["own", "another worker's", "no"])
def test_a_read_is_timed(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real agents on both sides; the owner's memory is unchanged. It reads as a decode engine without a secret."""
    from kvhma.nixl import Agent
    from support.boards import board_of

    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    geometry = tiny_hybrid(10)
    memory = [np.full(region.bytes, 7, np.uint8) for region in geometry.regions]
    moved = [replace(region, base=int(held.ctypes.data)) for region, held in zip(geometry.regions, memory, strict=True)]
    geometry = replace(geometry, regions=tuple(moved))
    private, public = new_agent_key()
    address = Address("127.0.0.1", free_port())
    with Agent(f"owner-{key_hash(public)}", public_key=public) as agent:
        agent.register(geometry)
        lease_board, extra = board_of(agent, public if board == "own" else bytes(32))
        extra = EXTRA if board == "no" else extra
        local = LocalEngine("p", 1, {(0, 0): (agent.handshake_payload(geometry, extra), private)})
        listener = Listener(address, local, leases=AnyLease(), secrets=Secrets(), counters=Counted())
        stop = threading.Event()
        taken: list[Any] = []

        def take() -> None:
            while not stop.wait(0.01):
                taken.extend(agent.notifications())

        thread = threading.Thread(target=take)
        thread.start()
        try:
            done = cli("doctor", "--peer", address, "--read", "--json")
        finally:
            stop.set()
            thread.join()
            listener.close()
            lease_board.close()
    state, found = rows(done)["read"]
    assert (done.code, state) == ((0, "ok") if board == "own" else (1, "failed")), found
    begins = {
        "own": f"{len(null_rows(geometry))} runs of the null block, ",
        "another worker's": f"the memory that 'owner-{key_hash(public)}' names is not that worker's",
        "no": f"worker 'owner-{key_hash(public)}' has no lease board that shows whose memory it is",
    }
    assert found.startswith(begins[board])
    assert all((held == 7).all() for held in memory)
    assert taken == []


@pytest.mark.nixl
@pytest.mark.usefixtures("peer_only")
def test_a_read_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid metadata ends a process, or raises there: the command reports it in one line."""
    with engine([tiny_hybrid(10)]) as address:
        done = cli("doctor", "--peer", address, "--read", "--json")
    assert (done.code, rows(done)["read"][0]) == (1, "failed")


# --- this host -------------------------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with an Ethernet card that is up, one that is not, and an RDMA card with two ports."""
    files = {
        "net/lo/operstate": "unknown",
        "net/eth0/operstate": "up",
        "net/eth0/speed": "25000",
        "net/eth1/operstate": "down",
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
        "infiniband/mlx5_0/ports/2/state": "1: DOWN",
        "status": "Name:\tx\nCapEff:\t0000000000000000",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(doctor_host, "_NET", tmp_path / "net")
    monkeypatch.setattr(doctor_host, "_RDMA", tmp_path / "infiniband")
    monkeypatch.setattr(doctor_host, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(doctor_host.platform, "system", lambda: "Linux")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    return tmp_path


def test_cards_are_named(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards, _ = doctor_host.look_at_host()
    listed = "eth0 (25 Gb/s), mlx5_0:1 (ACTIVE, 200 Gb/sec (4X HDR)), mlx5_0:2 (DOWN, rate unknown)"
    assert (cards.state, cards.found) == ("note", listed)
    assert "without mlx5_0:2" in cards.fix
    for chosen, state in (("mlx5_0:1,eth0", "ok"), ("all", "note"), ("mlx5_1:1,eth0", "failed"), ("eth1", "failed")):
        monkeypatch.setenv("UCX_NET_DEVICES", chosen)
        assert next(doctor_host.look_at_host()).state == state, chosen


@pytest.mark.parametrize(
    ("limit", "capability", "rdma", "state"),
    [(-1, 0, True, "ok"), (65536, 0, True, "note"), (65536, 1 << 14, True, "ok"), (65536, 0, False, "ok")],
)
def test_memlock(
    limit: int, capability: int, rdma: bool, state: str, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    (host / "status").write_text(f"CapEff:\t{capability:016x}\n")
    if not rdma:
        monkeypatch.setattr(doctor_host, "_RDMA", host / "none")
    _, memlock = doctor_host.look_at_host()
    assert memlock.state == state
    assert bool(memlock.fix) == (state == "note")


# --- export ----------------------------------------------------------------------------------------------------------


def test_exported_geometries_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret_file: Path) -> None:
    """Two engines of several ranks: every file is the worker's geometry, and plan, explain, diff and map read it."""
    monkeypatch.chdir(tmp_path)
    for name, ranks, base in (("p", 2, 1 << 30), ("d", 1, 2 << 40)):
        with engine(geometries(ranks, base), secret=True) as address:
            done = cli("export", address, "-o", f"{name}.json", "--secret-file", secret_file, "--json")
        assert (done.code, done.form["kvhma_export"], done.form["name"]) == (0, 1, "p")
        names = ["d.json"] if ranks == 1 else ["p-0.json", "p-1.json"]
        assert [row["file"] for row in done.form["files"]] == names
        assert [Geometry.from_json(Path(one).read_bytes()) for one in names] == geometries(ranks, base)
    pair = ("--local", "d.json", "--remote", "p-0.json", "--remote", "p-1.json")
    assert cli("plan", *pair, "--tokens", 1000).code == 0
    assert cli("explain", *pair).code == 0


def test_a_case_is_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/cases.md").read_text()
    Path("case.json").write_text(page.split("```json\n")[1].split("```")[0])
    done = cli("export", "--case", "case.json", "-o", "failed.json", "-q")
    assert done.code == 0
    names = done.out.split()
    case = cases.load(Path("case.json"))
    assert names == ["failed-local.json", *(f"failed-remote-{n}.json" for n in range(len(case.remotes))), names[-1]]
    remotes = [word for name in names[1:-1] for word in ("--remote", name)]
    planned = cli("plan", "--local", names[0], *remotes, "--request", names[-1], "--json").form
    verdict = cases.check(case)
    assert (planned["bytes"], planned["descriptors"]) == (verdict.bytes, verdict.descriptors)


def test_what_cannot_be_written_or_read_is_one_line(tmp_path: Path) -> None:
    with engine([tiny_hybrid(10)]) as address:
        assert "No such file or directory" in refused("export", address, "-o", tmp_path / "no" / "x.json")
    (tmp_path / "case.json").write_text("{}")
    assert "field 'kvhma_case' is missing" in refused("export", "--case", tmp_path / "case.json")
