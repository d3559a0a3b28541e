# SPDX-License-Identifier: Apache-2.0
"""A prefill and two decode engines under load over a link that fails: `make faults`."""
