# SPDX-License-Identifier: Apache-2.0
"""Spans: the times of a traced request's loads, for OpenTelemetry."""
