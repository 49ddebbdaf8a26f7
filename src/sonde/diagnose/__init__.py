# SPDX-License-Identifier: Apache-2.0
"""Why work on this node became slower: rows of the last minute in, an incident out.

Pure: no file, clock, socket or BPF. docs/design/diagnose.md describes how it decides.
"""
