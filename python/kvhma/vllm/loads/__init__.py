# SPDX-License-Identifier: Apache-2.0
"""What a decode engine wants of other engines, in the scheduler's process: a load is a machine of states."""
