# SPDX-License-Identifier: Apache-2.0
"""Typed queries over captures, answered by an embedded SQL engine (DuckDB over Arrow).

`capture` reads a `.sonde` file into columnar tables, `session` opens them in the engine, `queries`
and the modules named after a subject (`memory`, `device_runs`, ...) return typed rows.
"""
