# SPDX-License-Identifier: Apache-2.0
"""Options of the connector, each in its own folder. The connector's other parts import `doors` only."""
