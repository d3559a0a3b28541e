# SPDX-License-Identifier: Apache-2.0
"""What an engine tells about itself: metrics, stalls."""
