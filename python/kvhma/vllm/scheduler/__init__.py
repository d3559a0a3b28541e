# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler's process: requests, leases, and which blocks D's prefix cache may serve."""
