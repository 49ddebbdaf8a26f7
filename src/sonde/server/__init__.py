# SPDX-License-Identifier: Apache-2.0
"""The service: takes chunks and OTLP, answers questions over HTTP. docs/design/store.md

Terms:
- tenant: whose data it is; scope: what a token allows; open: no token is needed
- fork server: the process that children are forks of, with all that they import
- engine: DuckDB, which answers questions
- question: a query over HTTP, with options (its parameters); answer: what is sent for it
- selection (`query.selection`): which rows a question reads: a time, nodes, processes, kinds
- refusal: an error as clients get it, with cause and remedy; caller: whose token a request has
- place, turn: room for a request that waits or is served; permission to be served now
- bucket: the object store; class Bucket: a token bucket, a rate with a burst
- collection: whether agents observe anything; authority: who paused it
- pause: an order to agents to collect nothing; seen: when an agent sent or asked something last
- release: noised totals of a fleet, of samples that nodes sent; collected: how many releases there
  are, spent: how much of the privacy budget they took; holder: an owner that holds GPUs
- cell: a rank in a slot, in the heat map of ranks; collectives: kernels of collective operations
- paced, packed: sent no faster than it is read; compressed
- held, productive, stalled, idle: of GPU time (`query.stored_use`); wasted: stalled and idle
- by: what kind of owner rows are named by; reduce: how an alert rule makes values one (max, …)
- compared: ranks that were timed at the same time; timed: runs whose time was measured
- left out, not shown: beyond the limit of an answer (entries; a weight)
- about: what a chunk's metadata reports of its capture; in noise: not larger than its noise
"""
