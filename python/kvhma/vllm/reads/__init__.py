# SPDX-License-Identifier: Apache-2.0
"""What a worker of a decode engine does: it plans, reads, checks and reports."""
