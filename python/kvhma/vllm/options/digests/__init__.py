# SPDX-License-Identifier: Apache-2.0
"""Content digests: P sums the blocks that it hands off, and D compares what it has loaded with P's sums."""
