# SPDX-License-Identifier: Apache-2.0
"""Captures in the formats of others, and in our own for people.

Every exporter is one module with `write(session, out, kinds, where)`, which writes to a binary
stream what `sonde.query` answers. None of them prints.
"""
