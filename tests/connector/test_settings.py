# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from kvhma.errors import SettingsError
from kvhma.vllm.config.settings import Settings, rows
from kvhma.vllm.wire.params import Address
from support.programs import program

WILDCARDS = ["0.0.0.0", "::", "0", "0x0", "0.0", "::ffff:0.0.0.0", "0:0::0", "::%eth0"]


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"leese": 1}, "unknown.*leese"),
        ({"kv_lease_duration": 0}, "kv_lease_duration is 0.*1..86400"),
        ({"kv_lease_duration": "5"}, "kv_lease_duration is '5'"),
        ({"kv_lease_duration": float("nan")}, "nan"),
        ({"num_threads": 1.5}, "num_threads is 1.5, expected int 0..256"),
        ({"prefill_engines": "p:5600"}, "prefill_engines is 'p:5600', expected a list of host:port"),
        ({"prefill_engines": ["p"]}, r"prefill_engines is \['p'\]"),
        ({"prefill_engines": ["p:70000"]}, "prefill_engines"),
        ({"allowed_prefill_engines": "10.0.0.0/8"}, "allowed_prefill_engines is '10.0.0.0/8', expected a list"),
        ({"allowed_prefill_engines": ["p", 7]}, "allowed_prefill_engines is"),
        ({"allowed_prefill_engines": ["p:65536"]}, "allowed_prefill_engines is"),
        ({"allowed_prefill_engines": ["*.example"]}, "allowed_prefill_engines is"),
        ({"allowed_prefill_engines": ["10.0.0.0/33"]}, "allowed_prefill_engines is"),
        ({"secret_file": ""}, "secret_file is '', expected a path"),
        ({"net_devices": "eth0, eth1"}, "net_devices is 'eth0, eth1', expected names"),
        ({"net_devices": "eth0\n"}, "net_devices is"),
        ({"max_held_share": 0}, "max_held_share is 0, expected float 0.01..1"),
        ({"backends": []}, "backends is"),
        ({"side_channel_port": 70000}, "70000"),
        ({"advertised_port": 0}, "advertised_port is 0, expected int 1..65535"),
        ({"advertised_host": ""}, "advertised_host is '', expected a name or an address"),
        ({"advertised_host": "10.0.0.7:5600"}, "advertised_host is '10.0.0.7:5600', expected .* without a port"),
        ({"advertised_host": "[::1]"}, "advertised_host is"),
        *(({"advertised_host": host}, f"advertised_host is '{host}', expected one address") for host in WILDCARDS),
        ({"max_peers": 4097}, "max_peers is 4097, expected int 1..4096"),
        ({"bidirectional_kv_xfer": 1}, "bidirectional_kv_xfer is 1, expected bool"),
        ({"kv_recompute_threshold": -1}, "kv_recompute_threshold is -1, expected int"),
        ({"model_id": 7}, "model_id is 7, expected 1..512 printable characters"),
        ({"model_id": "a\nb"}, "model_id is"),
        ({"case_folder": "a\nb"}, "case_folder"),
    ],
)
def test_refused(extra, match):
    with pytest.raises(SettingsError, match=match):
        Settings.read(extra)


UPSTREAM = {
    "push_registration_timeout": 480,
    "enforce_handshake_compat": False,
    "enable_cross_layers_blocks": "True",
}


def test_settings_of_upstream_stop_nothing_and_are_named():
    """A configuration that was written for upstream's connector starts; the log names what kvhma lacks."""
    assert Settings.read(UPSTREAM | {"kv_lease_duration": 20}).kv_lease_duration == 20
    assert [text.partition(" (")[0] for text in Settings.read(UPSTREAM).ignored] == list(UPSTREAM)
    for name, value in UPSTREAM.items():
        (text,) = Settings.read({name: value}).ignored
        assert text.startswith(f"{name} (")


def allows(host: str, port: int = 5600, *, entries: list[str], known: list[str] | None = None) -> bool:
    extra = {"allowed_prefill_engines": entries, "prefill_engines": known or []}
    return Settings.read(extra).sources(has_secret=True).refusal(Address(host, port)) is None


def test_any_engine_with_the_secret_is_allowed_unless_the_operator_says_which():
    assert Settings().sources(has_secret=True).refusal(Address("198.51.100.7", 1)) is None
    assert not allows("198.51.100.7", entries=[])


@pytest.mark.parametrize(
    ("entry", "inside", "outside"),
    [
        ("prefill-1", ["prefill-1", "PREFILL-1", "prefill-1."], ["prefill-2", "prefill-1.evil.example", "10.0.0.1"]),
        ("P.example.", ["p.EXAMPLE"], ["example", "q.p.example"]),
        ("10.0.0.1", ["10.0.0.1", "::ffff:10.0.0.1", "::ffff:a00:1"], ["10.0.0.2", "::10.0.0.1", "10.1", "0xa000001"]),
        ("10.0.0.0/8", ["10.255.0.1", "::ffff:10.3.0.1"], ["11.0.0.1", "010.0.0.1", "167772161", "10.0.0.1.example"]),
        # A network would accept these, and they were then looked up as names.
        ("10.0.0.0/8", ["10.0.0.1"], ["10.0.0.1/32", "10.0.0.1/8", "10.0.0.1%../x"]),
        ("10.9.8.7/8", ["10.0.0.1"], ["9.9.8.7"]),
        ("2001:db8::/32", ["2001:db8::1", "2001:DB8:0::1"], ["2001:db9::1", "10.0.0.1"]),
        ("2001:db8::1", ["2001:db8:0:0::1"], ["2001:db8::2"]),
        ("::ffff:10.0.0.0/104", ["10.1.2.3", "::ffff:10.1.2.3"], ["11.1.2.3"]),
        ("fe80::/10", ["fe80::1%eth0", "fe80::1"], ["ff80::1%eth0"]),
        ("0.0.0.0/0", ["10.0.0.1"], ["::1", "prefill-1"]),
    ],
)
def test_what_an_entry_allows_without_looking_names_up(entry, inside, outside):
    assert [host for host in inside if not allows(host, entries=[entry])] == []
    assert [host for host in outside if allows(host, entries=[entry])] == []


@pytest.mark.parametrize(
    "entry", ["p:5600", "10.0.0.1:5600", "10.0.0.0/8:5600", "[2001:db8::1]:5600", "[2001:db8::]/32:5600"]
)
def test_an_entry_with_a_port_allows_no_other(entry):
    host = "p" if entry.startswith("p") else "2001:db8::1" if entry.startswith("[") else "10.0.0.1"
    assert allows(host, 5600, entries=[entry])
    assert not allows(host, 5601, entries=[entry])


def test_engines_to_connect_to_are_always_allowed():
    known = ["prefill-1:5600", "10.0.0.1:5600", "[2001:db8::1]:5600"]
    assert allows("PREFILL-1", entries=[], known=known)
    assert allows("::ffff:10.0.0.1", entries=[], known=known)
    assert allows("2001:db8:0::1", entries=[], known=known)
    assert not allows("prefill-1", 5601, entries=[], known=known)
    assert not allows("10.0.0.2", entries=[], known=known)


def test_the_page_has_a_row_for_each_setting() -> None:
    """If not, run `python tools/settings.py`."""
    settings = program("tools/settings.py")
    page = (Path(__file__).parents[2] / "docs/vllm-settings.md").read_text(encoding="utf-8")
    assert settings.filled(page) == page
    with pytest.raises(ValueError, match="no line"):
        settings.filled(page.replace("end of settings", ""))


def test_an_empty_text_is_none() -> None:
    """A template of Kubernetes leaves `side_channel_host: ""` where nothing was set: the environment decides then."""
    found = Settings.read({"side_channel_host": "", "kv_cache_layout": ""})
    assert (found.side_channel_host, found.kv_cache_layout) == ("", "")


def test_null_is_the_default() -> None:
    assert Settings.read(dict.fromkeys(rows())) == Settings()
