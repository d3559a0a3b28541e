# SPDX-License-Identifier: Apache-2.0
"""What an engine holds for other engines, in the scheduler's process: P's requests and offers, D's answers."""
