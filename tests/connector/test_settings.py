# SPDX-License-Identifier: Apache-2.0
import pytest

from kvhma.errors import SettingsError
from kvhma.vllm.settings import Settings
from kvhma.vllm.wire.params import Address


def test_defaults():
    assert Settings.read({}) == Settings()


def test_given():
    found = Settings.read({"kv_lease_duration": 5, "backends": ["UCX", "GDS"], "host_staged": True, "num_threads": 4})
    assert (found.num_threads, found.progress_delay_us) == (4, 1000)
    assert Settings.read({"progress_delay_us": 0}).progress_delay_us == 0
    assert Settings.read({"prewarm": True, "switch_interval_us": 500}) == Settings(prewarm=True, switch_interval_us=500)
    assert found.kv_lease_duration == 5.0
    assert found.backends == ("UCX", "GDS")
    assert found.host_staged is True


def test_addresses():
    found = Settings.read({"prefill_engines": ["p:5600", "[::1]:5601"]})
    assert found.prefill_engines == (Address("p", 5600), Address("::1", 5601))


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"leese": 1}, "unknown.*leese"),
        ({"kv_lease_duration": 0}, "kv_lease_duration is 0.*1..86400"),
        ({"kv_lease_duration": "5"}, "kv_lease_duration is '5'"),
        ({"kv_lease_duration": float("nan")}, "nan"),
        ({"load_retries": 1.5}, "load_retries is 1.5, expected int"),
        ({"load_retries": True}, "load_retries is True"),
        ({"prefill_engines": "p:5600"}, "prefill_engines is 'p:5600', expected a list of host:port"),
        ({"prefill_engines": ["p"]}, r"prefill_engines is \['p'\]"),
        ({"prefill_engines": [":5600"]}, "prefill_engines"),
        ({"prefill_engines": ["p:0"]}, "prefill_engines"),
        ({"prefill_engines": ["p:70000"]}, "prefill_engines"),
        ({"prefill_engines": [5600]}, "prefill_engines"),
        ({"backends": []}, "backends is"),
        ({"backends": "UCX"}, "backends is"),
        ({"side_channel_port": 70000}, "70000"),
        ({"progress_delay_us": 2_000_000}, "progress_delay_us is 2000000, expected int 0..1000000"),
        ({"prewarm": 1}, "prewarm is 1, expected bool"),
        ({"switch_interval_us": 0}, "switch_interval_us is 0, expected int 10..1000000"),
        ({"host_staged": 1}, "host_staged is 1, expected bool"),
        ({"model_id": 7}, "model_id is 7, expected str"),
        ({"model_id": ""}, "model_id is '', expected 1..512"),
        ({"model_id": "a\nb"}, "model_id is"),
        ({"bidirectional_kv_xfer": True}, "bidirectional_kv_xfer is True, only False"),
    ],
)
def test_refused(extra, match):
    with pytest.raises(SettingsError, match=match):
        Settings.read(extra)


def test_upstreams_defaults_are_accepted_and_named():
    assert Settings.read({"kv_recompute_threshold": 64}).ignored == ("kv_recompute_threshold",)
