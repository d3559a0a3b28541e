# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine holds for other engines, in the scheduler's process: blocks, leases, offers, kept turns."""
