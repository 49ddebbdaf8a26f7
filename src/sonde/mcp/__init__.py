# SPDX-License-Identifier: Apache-2.0
"""A Model Context Protocol server: the questions of a Sonde server as tools for assistants.

It holds no data. Each call is a question over HTTP with a token for `read`, so tenants, limits and
the audit log are the server's. Names in answers were chosen by recorded programs and are hostile:
every text is escaped and cut (untrusted.py). Every answer is bounded, and lists how many rows are
left out; of a verdict it has the first causes and evidence.

Terms:
- selection: a range of time, a node and owners (columns of `process`: user, job, pod, …)
- observed: what an answer rests on: nodes, chunks, seconds recorded, losses
- trouble: something wrong with a node
- box: a function of a flame graph, or a chain of functions that only call the next one
"""
