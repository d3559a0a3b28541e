# SPDX-License-Identifier: Apache-2.0
"""Token ids are hashed alike for all integer types and pieces. Cargo's tests check BLAKE3 itself."""

import numpy as np
import pytest

from kvhma._kvhma import digest_prefixes, digest_tokens
from kvhma.errors import RequestError

PIECE = 16384  # ids that are hashed at a time


class Number(int):
    """An int subclass, which the fast reader leaves to the slow one."""


@pytest.mark.parametrize("count", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_kinds_of_integers_are_one(count):
    ids = [(index * 7919) % 200_000 for index in range(count)]
    expected = digest_tokens(b"header", ids, count)
    assert len(expected) == 16
    assert digest_tokens(b"header", [*map(Number, ids)], count) == expected
    assert digest_tokens(b"header", list(np.array(ids, dtype=np.int64)), count) == expected
    assert digest_tokens(b"header", [*ids, 5], count) == expected, "what is behind does not count"


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, PIECE + 100])
def test_every_id_counts_and_so_does_the_header(at):
    ids = list(range(PIECE + 101))
    changed = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    assert digest_tokens(b"", changed, len(ids)) != digest_tokens(b"", ids, len(ids))
    assert digest_tokens(b"a", ids, len(ids)) != digest_tokens(b"", ids, len(ids))
    assert digest_tokens(b"", ids, at) != digest_tokens(b"", ids, at + 1)


def test_the_ends_of_32_bits():
    ends = [-(2**31), -1, 0, 2**31 - 1]
    assert len({digest_tokens(b"", [number], 1) for number in ends}) == 4


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1, 2**31], "tokens: 2147483648 does not fit 32 bits"),
        ([1, -(2**31) - 1], "tokens: -2147483649 does not fit"),
        ([1, 2**70], "tokens: 1180591620717411303424 of type int is not an integer of 64 bits"),
        ([1, "2"], "tokens: '2' of type str is not an integer"),
        ([1, None], "tokens: None of type NoneType"),
        ([1], "tokens: 1 of 2 are in the list"),
    ],
)
def test_refused(ids, text):
    with pytest.raises(RequestError, match=text):
        digest_tokens(b"", ids, 2)


def test_items_that_change_the_list_while_they_are_read():
    class Evil:
        def __index__(self):
            ids.clear()
            return 1

    ids = [Evil(), *range(1000)]
    with pytest.raises(RequestError, match="tokens: the list has lost id 1 while it was read") as caught:
        digest_tokens(b"", ids, 1001)
    error = caught.value
    assert (error.code, error.field, error.value, error.expected) == ("count", "tokens", 0, "more than 1")


def test_prefixes_in_one_pass():
    ids = [(index * 7919) % 200_000 for index in range(2 * PIECE + 9)]
    counts = [0, 1, 5, 5, PIECE - 1, PIECE + 3, 2 * PIECE + 9]
    assert digest_prefixes(ids, counts) == [digest_tokens(b"", ids, count) for count in counts]
    assert digest_prefixes(ids, []) == []
    with pytest.raises(RequestError, match="counts: entry 1 is less than the one before"):
        digest_prefixes(ids, [5, 4])
    with pytest.raises(RequestError, match="tokens: 2 of 3 are in the list"):
        digest_prefixes([1, 2], [1, 3])
    with pytest.raises(RequestError, match="tokens: 2147483648 does not fit 32 bits"):
        digest_prefixes([1, 2**31], [1, 2])
