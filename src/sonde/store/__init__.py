# SPDX-License-Identifier: Apache-2.0
"""What a server remembers: a write-ahead log of chunks, then immutable Parquet, and a catalog.

docs/design/store.md describes what is durable when, and what is not done.
"""
