# SPDX-License-Identifier: Apache-2.0
"""Readers of other tools' files. Each format has a module whose `read(path)` returns a timeline.

The counterpart of `export`. Sonde's own captures are read by `query`.
"""
