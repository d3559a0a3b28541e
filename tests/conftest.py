# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

import pytest

from support.leaks import nothing_left

nothing_left_by_module = pytest.fixture(nothing_left, scope="module", autouse=True)
nothing_left_by_test = pytest.fixture(nothing_left, autouse=True)
