# SPDX-License-Identifier: Apache-2.0
"""Where chunks and metrics are written: capture files, Prometheus, OTLP.

Terms:
- series: the values of one metric with one set of labels
- party, tenant: among whom the room for series is shared
- spool: chunks on disk that the server has not acknowledged yet
- quiet: nothing is sent for a while, as an answer asked for by Retry-After
- collect: to observe; a server switches it off and on (pauses, resumes) for its agents
- page: the text of all series, as Prometheus reads it; family: a metric with its series
- plain series: one that is about no process; owned series: a sum over the processes of an owner
- base: the owner of a process as attributes, without its program; kept: a row's other attributes
- rest: a series `other`, to which is added what exceeds a share; folded: added to such a series
- to forget: to drop a series or entry that had no value for a while; left out: no room for it
- part: of a chunk: rows of one table as columns; compacted: rows that were made columns
- push: one request with all series to an OpenTelemetry collector
"""
