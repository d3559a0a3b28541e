# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

import pytest
from hypothesis import HealthCheck, settings

from support.leaks import nothing_left

# A machine may be busy. What takes too long by itself ends by pytest's own limit.
settings.register_profile("kvhma", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvhma")

nothing_left_by_module = pytest.fixture(nothing_left, scope="module", autouse=True)
nothing_left_by_test = pytest.fixture(nothing_left, autouse=True)
