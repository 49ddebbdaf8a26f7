# SPDX-License-Identifier: Apache-2.0
"""Exports captures: to HTML, tables and text for people, and to the formats of other tools.

Each exporter is a module with `write(session, out, kinds, where)`, which writes results of
`sonde.query` to a binary stream. None of them prints.
"""
