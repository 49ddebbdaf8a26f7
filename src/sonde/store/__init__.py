# SPDX-License-Identifier: Apache-2.0
"""What a server remembers: a write-ahead log of chunks, then immutable Parquet, and a catalog.

docs/design/store.md describes what is durable when, and what is not done.

Terms:
- log: the write-ahead log of chunks, in segments; record: a chunk in it; sealed: closed for writing
- flush: from the log to Parquet; flusher: the child process that does it
- batch: chunks that one transaction stores; draft: a file that is not written to its end yet
- level: 0 as flushed, above that compacted, -1 not to be compacted; counts: is read by questions
- engine: DuckDB, which reads and merges Parquet files; question: a query of a server's client
- dictionary: a table whose rows are stored once a day: frame, stack, process, thread
- sums, summed: rows of `sample` summed up ahead, in the files of another table
- bucket: the object store; generation: a numbered, written-once state of a catalog
- look: one reading of the other servers' catalogs; at hand: in the directory already
- node: the machine that sent a chunk; tenant: whose data it is
- digest: names a chunk by tenant, node and content, so that it is stored once
- origin: a chunk of a batch, without its rows; about: `capture` of its metadata
- attempt: a flusher's try to store what follows an offset; crash, death: one that ended in it
- published: in a bucket, where all servers see it; adopt: to take in what a bucket has
"""
