# SPDX-License-Identifier: Apache-2.0
"""Where chunks and metrics are written: capture files, Prometheus, OTLP.

Terms:
- series: the values of one metric with one set of labels
- party, tenant: among whom the room for series is shared
- spool: chunks on disk that the server has not acknowledged yet
- quiet: nothing is sent for a while, as an answer asked for by Retry-After
- page: the text of all series, as Prometheus reads it; family: a metric with its series
- push: one request with all series to an OpenTelemetry collector
"""
