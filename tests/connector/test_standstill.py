# SPDX-License-Identifier: Apache-2.0
"""A stalled machine or process is noticed."""

import time

import pytest

from kvhma.vllm.telemetry import stall_watch as module
from kvhma.vllm.telemetry.stall_watch import Clocks, StallWatch, find_stall
from support.counted import Counted

BEFORE = Clocks(monotonic=100.0, boottime=500.0, realtime=1e9)


def after(monotonic, boottime=None, realtime=None):
    boottime, realtime = (monotonic if clock is None else clock for clock in (boottime, realtime))
    return Clocks(100.0 + monotonic, 500.0 + boottime, 1e9 + realtime)


@pytest.mark.parametrize(
    ("clocks", "seconds", "text"),
    [
        (after(1.0), None, ""),
        (after(2.5), None, ""),
        (after(1.0, boottime=9.0, realtime=9.0), 8.0, "suspended"),
        (after(9.0), 8.0, "did not run"),
        (after(1.0, realtime=9.0), 8.0, "stopped from outside"),
        (after(1.0, realtime=-3600.0), None, ""),
    ],
    ids=["nothing", "a busy second", "suspended", "stopped", "restored", "clock set back"],
)
def test_what_the_clocks_say(clocks, seconds, text):
    found = find_stall(BEFORE, clocks, 1.0)
    if seconds is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] == pytest.approx(seconds)
        assert text in found[1]


def test_one_line_and_one_count_for_each(monkeypatch, caplog):
    jump = [0.0]
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 0.01)
    real = module.read_clocks
    monkeypatch.setattr(module, "read_clocks", lambda: real()._replace(boottime=real().boottime + jump[0]))
    counted = Counted()
    watch = StallWatch(counted)
    try:
        time.sleep(0.1)
        assert not counted.numbers
        jump[0] = 8.0
        time.sleep(0.1)
        assert counted.numbers == {"stalls": 1}
        (line,) = (record.getMessage() for record in caplog.records)
        assert line == "kvhma: process stalled for 8.0 s: the machine was suspended"
    finally:
        watch.close()
