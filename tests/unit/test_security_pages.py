# SPDX-License-Identifier: Apache-2.0
"""What the pages on security say is shown by tests: those that they name exist, and no file of attacks is left out."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvhma.planning import DEFAULT_MAX_DESCRIPTORS
from kvhma.vllm.holds.lease_table import MAX_READERS
from kvhma.vllm.holds.offers import MAX_TICKETS
from kvhma.vllm.loads import lease_renewer, ticket_follower, ticket_followers
from kvhma.vllm.peers import board_reader, connection, connections, names, peers, prefill_engines, room, server
from kvhma.vllm.wire import lease_board, messages, peer_log

ROOT = Path(__file__).parents[2]
PAGES = ["docs/attacker.md", "docs/security.md"]
TEST = re.compile(r"`([\w/]+/test_\w+\.py)::(test_\w+)`")
MOST_WORDS = 1500


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def collected(file: str) -> set[str]:
    """Names of the functions that pytest collects in a file; a file that needs vLLM cannot be imported here."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def rows() -> list[list[str]]:
    """The cells of all tables of the page on attackers, without their heads."""
    lines = [line for line in page("docs/attacker.md").splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return [cells for cells in found if cells[0] != "place" and "---" not in cells]


@pytest.mark.parametrize("name", PAGES)
def test_each_named_test_exists(name: str) -> None:
    named = TEST.findall(page(name))
    assert len(named) > 30
    assert len(named) == page(name).count(".py::"), "each is written as FOLDER/test_FILE.py::test_NAME"
    for file, test in named:
        assert (ROOT / "tests" / file).is_file(), file
        assert test in collected(file), f"{file}::{test}"


def test_each_file_of_attacks_is_in_a_row() -> None:
    files = {f"attacks/{path.name}" for path in (ROOT / "tests/attacks").glob("test_*.py")}
    named = {file for cells in rows() for cell in cells for file, _ in TEST.findall(cell)}
    assert files - named == set()


def test_each_cell_names_a_test_or_says_why_there_is_none() -> None:
    found = rows()
    assert len(found) > 25
    for cells in found:
        _, what, without, with_secret = cells
        assert what in ("reads", "changes", "stops", "changes, stops", "all"), cells
        for cell in (without, with_secret):
            is_reference = cell in ("the same", "as the row below") or "the same test" in cell
            assert TEST.search(cell) or "no test: " in cell or is_reference, cell


def test_the_page_stays_short() -> None:
    assert len(page("docs/attacker.md").split()) <= MOST_WORDS


KIB, MIB = 10, 20
BOUNDS = {
    "a question; a reply": [
        messages.MAX_QUESTION_BYTES >> MIB,
        messages.MAX_ANSWER_BYTES >> MIB,
        messages.MAX_IDENTITY_BYTES >> MIB,
    ],
    "unfinished questions": [connections.MAX_QUESTIONS_BYTES >> MIB, connections.MAX_ANSWERS_BYTES >> MIB],
    "connections of a listener": [connections.MAX_CONNECTIONS],
    "new connections": [server._BACKLOG],
    "TLS handshakes at a time": [connections.MAX_HANDSHAKES],
    "time for a TLS handshake": [connection.HANDSHAKE_SECONDS, connection.QUESTION_SECONDS, connection.IDLE_SECONDS],
    "worker identities stored": [prefill_engines._MAX_IDENTITIES_BYTES >> MIB],
    "handshakes at a time;": [prefill_engines._MAX_AT_ADDRESS],
    "stored worker identities": [prefill_engines._MAX_IDENTITIES_BYTES >> MIB],
    "name lookups": [names._MAX_LOOKUPS] * 2,
    "engines that D renews": [lease_renewer._MAX_SESSIONS],
    "tickets at P;": [MAX_TICKETS, ticket_followers.MAX_FOLLOWED, ticket_follower._BLOCKS_MORE],
    "a reply about a ticket": [
        messages.MAX_PROGRESS_BYTES >> MIB,
        ticket_follower._ANSWER_BYTES >> KIB,
        ticket_follower._BLOCK_BYTES,
        messages.MAX_WAIT_SECONDS,
    ],
    "unfinished replies about tickets": [ticket_followers.MAX_UNREAD_BYTES >> MIB],
    "questions without a reply of": [room.MAX_WAITING],
    "questions that wait": [peers._MAX_QUEUED_AT_ADDRESS, peers._MAX_QUEUED],
    "questions without a reply at": [room.MAX_AT_ADDRESS] * 2 + [room.MAX_AT_UNKNOWN_ADDRESS] * 2,
    "tickets in one question": [messages.MAX_TICKETS_ASKED],
    "claims in a question": [messages.MAX_CLAIMS, MAX_READERS],
    "time for P's lease board": [
        board_reader._LATE_SECONDS * 1000,
        board_reader._AT_ONCE_SECONDS * 1000,
        lease_board.BOARD_BYTES >> KIB,
    ],
    "lease boards of a process": [
        lease_board.BOARD_PLACES,
        lease_board.BOARD_PLACES * lease_board._PLACE_BYTES >> MIB,
        lease_board.BOARD_BYTES >> KIB,
    ],
    "descriptors of a request": [DEFAULT_MAX_DESCRIPTORS],
    "a value in a log line": [2000, peer_log._MAX_TRACEBACK_LINES],
    "lines that a peer": [peer_log._SECONDS],
}
"""The numbers of each row of the table of bounds, but for those that are words."""

OTHER_BOUNDS = {
    "processor time of D's": "attacks/test_tickets.py::test_p_with_news_without_end_takes_half_of_a_core_at_most",
    "a lease that parameters": "connector/test_scheduler.py::"
    "test_a_lease_of_a_strangers_choosing_has_a_floor_and_a_ceiling",
    "P's blocks held": "attacks/test_other_tenants.py::test_requests_that_nobody_reads",
    "notifications of NIXL": "connector/test_notifications.py::test_strangers_fill_nothing",
    "planning, reading": "attacks/test_bounds.py::test_the_longest_geometry_is_read_soon",
}
"""The tests of the rows whose bound is no number, or whose number needs vLLM."""


def test_the_bounds_are_those_of_the_code() -> None:
    section = page("docs/security-bounds.md").partition("## Bounds")[2].partition("\n## ")[0]
    _, _, *lines = (line for line in section.splitlines() if line.startswith("|"))
    left = [*BOUNDS, *OTHER_BOUNDS]
    for line in lines:
        what, bound = (cell.strip() for cell in line[1:-1].split(" | "))
        (row,) = (start for start in left if what.startswith(start))
        left.remove(row)
        if row in BOUNDS:
            numbers = [float(number.replace(",", "")) for number in re.findall(r"(?<![\w/])\d[\d,]*(?:\.\d+)?", bound)]
            assert numbers == pytest.approx(BOUNDS[row]), what
    assert left == []
    for named in OTHER_BOUNDS.values():
        file, test = named.split("::")
        assert test in collected(file), named
