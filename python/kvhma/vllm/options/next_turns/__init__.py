# SPDX-License-Identifier: Apache-2.0
"""Next turns: D holds its answers, and P reads them for the next turns of their conversations."""
