# SPDX-License-Identifier: Apache-2.0
"""Files that other tools wrote, as timelines: each format a module with `read(path)`.

The counterpart of `export`: formats are spoken at the edges. Captures of our own are `query`'s.
"""
