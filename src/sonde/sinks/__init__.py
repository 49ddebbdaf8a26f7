# SPDX-License-Identifier: Apache-2.0
"""Where chunks and metrics are written: capture files, Prometheus, OTLP."""
