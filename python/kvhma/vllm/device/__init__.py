# SPDX-License-Identifier: Apache-2.0
"""The device of the caches: streams, events, memory."""
