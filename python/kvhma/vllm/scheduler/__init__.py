# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in the scheduler's process: requests, leases, what counts as cached."""
