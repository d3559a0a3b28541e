# SPDX-License-Identifier: Apache-2.0
import pytest

from kvhma.vllm.settings import Settings, SettingsError


def test_defaults():
    assert Settings.read({}) == Settings()


def test_given():
    found = Settings.read({"kv_lease_duration": 5, "backends": ["UCX", "GDS"], "host_staged": True, "num_threads": 4})
    assert found.kv_lease_duration == 5.0
    assert found.backends == ("UCX", "GDS")
    assert found.host_staged is True


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"leese": 1}, "unknown.*leese"),
        ({"kv_lease_duration": 0}, "kv_lease_duration is 0.*1..86400"),
        ({"kv_lease_duration": "5"}, "kv_lease_duration is '5'"),
        ({"kv_lease_duration": float("nan")}, "nan"),
        ({"load_threads": 1.5}, "load_threads is 1.5, expected int"),
        ({"load_threads": True}, "load_threads is True"),
        ({"backends": []}, "backends is"),
        ({"backends": "UCX"}, "backends is"),
        ({"side_channel_port": 70000}, "70000"),
        ({"host_staged": 1}, "host_staged is 1, expected bool"),
        ({"bidirectional_kv_xfer": True}, "bidirectional_kv_xfer is True, only False"),
    ],
)
def test_refused(extra, match):
    with pytest.raises(SettingsError, match=match):
        Settings.read(extra)


def test_upstreams_defaults_are_accepted_and_named():
    assert Settings.read({"kv_recompute_threshold": 64}).ignored == ("kv_recompute_threshold",)
