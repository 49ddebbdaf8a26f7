# SPDX-License-Identifier: Apache-2.0
"""Readers of other tools' files. Each format has a module whose `read(path)` returns a timeline.

The counterpart of `export`. Sonde's own captures are read by `query`.

Terms:
- lost: events of a file that were not understood, named in the timeline's notes
- range: a named stretch that a program marks (NVTX, record_function)
- budget: of memory, which a file may take until its verdict; `hold` takes a part of it
- head: of a file: its beginning, by which its format is detected; the keys before its list of
  events
- piece: a part of a file's text that is read at once
"""
