# SPDX-License-Identifier: Apache-2.0
"""The steps of ``make gpu`` on host memory: they work, so that a machine with a device is not needed for that."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("nixl")
torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")

from gpu import __main__ as runner
from gpu import order, transfers
from gpu.engine_steps import Expected
from gpu.place import Outcome, Place
from gpu.steps import STEPS
from support.engines import Answer
from support.waiting import HANG_SECONDS


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, len(STEPS) + 1), ids=lambda number: STEPS[number - 1].name)
def test_a_step(number):
    outcome = Outcome()
    STEPS[number - 1].run(Place("cpu"), outcome)
    assert outcome.facts


def test_a_step_finds_wrong_bytes(monkeypatch):
    """A step proves something only if it can fail."""
    read = transfers.Worker.read
    monkeypatch.setattr(transfers.Worker, "read", lambda self, peer, ours, theirs: read(self, peer, ours, ours))
    with pytest.raises(AssertionError):
        transfers.rows_in_one_process(Place("cpu"), Outcome())


def test_a_load_that_is_not_zeroed_is_found(monkeypatch):
    monkeypatch.setattr(order.DeviceMemory, "zero", lambda self, rows, after=None: None)
    with pytest.raises(AssertionError):
        order.zeroing(Place("cpu"), Outcome())


@pytest.mark.long
def test_a_step_in_a_process_of_its_own_ends_in_time():
    result = runner.run(9, "cpu", HANG_SECONDS)
    assert (result.verdict, result.problem) == ("passed", "")
    back = {"the first blocks to the device", "blocks to the device"}
    assert dict(result.outcome.facts).keys() == {"blocks to the host"} | back
    result = runner.run(2, "cpu", 0)
    assert (result.verdict, result.problem) == ("failed", "not done after 0 s")
    assert "device string: nothing" in runner.run(2, "nothing", HANG_SECONDS).problem


def test_without_a_device_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert runner.main([]) == 0
    assert capsys.readouterr().out == "no device: torch finds no accelerator, so nothing was tried\n"


def test_what_was_found_is_written(monkeypatch, tmp_path, capsys):
    good, bad = Outcome(), Outcome()
    good.time("a read", 0.002, 4_000_000)
    bad.add("before the error", 7)
    found = {
        1: runner.Result(1, good),
        2: runner.Result(2, bad, "Traceback\nValueError: a | b"),
        8: runner.Result(8, good),
    }
    monkeypatch.setattr(runner, "run", lambda number, *_: found[number])
    assert runner.main(["--device", "cuda:0", "--steps", "1,2,8", "--output", str(tmp_path)]) == 1
    text = (tmp_path / "RESULTS_GPU.md").read_text()
    assert "| 1. what is there | passed | a read | 2.000 ms, 2.00 GB/s |" in text
    assert "| failed | before the error | 7 |\n|  |  |  | Traceback<br>ValueError: a \\| b |" in text
    assert capsys.readouterr().out.endswith(text + "\n")


def test_a_step_that_is_killed_leaves_what_it_found(tmp_path):
    Outcome(file=tmp_path / "facts").add("a read", 7)
    assert json.loads((tmp_path / "facts").read_text()) == [["a read", "7"]]


def test_steps_with_engines_that_had_no_time_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "ENGINES", replace(runner.ENGINES, all_seconds=0))
    assert runner.main(["--engines", "--device", "cpu", "--output", str(tmp_path)]) == 1
    (page,) = tmp_path.iterdir()
    assert page.name == "RESULTS_CPU_ENGINES.md", "it would replace the page of a device"
    assert page.read_text().count("| not run |  | no time left |") == len(runner.ENGINES.steps)


def test_an_answer_from_a_wrong_cache_is_found():
    right, wrong = (
        Answer(tokens, [-1.0] * 2, [0.5] * 2, "length", None, None, None, None, 0.0) for tokens in ([1, 2], [1, 3])
    )
    expected = Expected([right], noise=0.1)
    assert expected.check([right]) == 0
    with pytest.raises(AssertionError, match="token 1 is 3, plain 2"):
        expected.check([wrong])
