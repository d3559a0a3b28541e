# SPDX-License-Identifier: Apache-2.0
"""Where a process has its lease boards: addresses where nothing else gets, all of which can be read."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("msgspec")

from kvhma.vllm.wire.lease_board import BOARD_PLACES, LeaseBoard, board_region, owner_of


def test_all_places_can_be_read_and_only_boards_are_written_to():
    """Over TCP, a read of a place that is not mapped would end the process."""
    board = LeaseBoard(b"k" * 32)
    first, last = board_region(0), board_region(BOARD_PLACES - 1)
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if first.base <= start <= last.base:
            found.append((start, end, rights))
    assert (found[0][0], found[-1][1] >= last.base + last.bytes) == (first.base, True)
    assert all(end == start for (_, end, _), (start, _, _) in pairwise(found))
    written = [start for start, end, rights in found if rights.startswith("rw")]
    assert board.region.base in written
    assert all(rights.startswith("r") for _, _, rights in found)
    board.close()


def test_places_are_used_again_and_are_zeros_before():
    boards = [LeaseBoard(bytes([number]) * 32) for number in range(3)]
    assert len({board.place for board in boards}) == 3
    for number, board in enumerate(boards):
        assert board.region == board_region(board.place)
        assert board._bytes[:32].tobytes() == owner_of(bytes([number]) * 32)
        board.close()
    freed = {board.place for board in boards}
    board = None
    boards.clear()
    again = LeaseBoard(b"k" * 32)
    assert again.place in freed
    assert not again._bytes[32:].any()
    again.close()


def test_a_process_that_has_no_place_left_has_no_board():
    boards = []
    with pytest.raises(OSError, match=f"{BOARD_PLACES} lease boards already"):  # noqa: PT012
        for _ in range(BOARD_PLACES + 1):
            boards.append(LeaseBoard(b"k" * 32))
    for board in boards:
        board.close()


def test_a_machine_without_files_has_boards_that_no_scheduler_opens(monkeypatch):
    def no_file(name):
        raise OSError(38, "no memfd")

    monkeypatch.setattr(os, "memfd_create", no_file)
    board = LeaseBoard(b"k" * 32)
    assert board.file is None
    assert board._bytes.tobytes() == owner_of(b"k" * 32) + bytes(len(board._bytes) - 32)
    board.close()


def test_an_address_that_is_taken_is_never_replaced():
    script = """
import ctypes, mmap
from kvhma.vllm.wire import lease_board
lease_board._map(lease_board._FIRST_PLACE, 4096, mmap.PROT_READ | mmap.PROT_WRITE, lease_board._FIXED_NOREPLACE, -1)
ctypes.memset(lease_board._FIRST_PLACE, 7, 4096)
try:
    lease_board.LeaseBoard(b"k" * 32)
except OSError as error:
    print(error, ctypes.string_at(lease_board._FIRST_PLACE, 4096) == bytes([7]) * 4096)
"""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "cannot map a lease board at 0x200000000000" in done.stdout
    assert done.stdout.endswith("True\n")
