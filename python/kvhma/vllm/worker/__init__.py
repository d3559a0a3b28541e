# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in a worker's process: loads, and the prefill engines that they read from."""
