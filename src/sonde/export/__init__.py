# SPDX-License-Identifier: Apache-2.0
"""Exports captures: to HTML, tables and text for people, and to the formats of other tools.

An exporter of captures is a module with `write(session, out, kinds, where)`, which writes results
of `sonde.query` to a binary stream; those of timelines, verdicts and differences take these. None
of them prints.

Terms:
- kind: which profile is written (`ProfileKind`: on-cpu, off-cpu, gpu-time, …)
- weight: of a stack or node, samples, ns or bytes by kind; self weight: without its callees
- leaf label: the name of what was waited for or called, on top of the stack
- track: a row of a timeline in a viewer, slices: the spans in it
- flow: the arrow of a viewer from a call to the run on the device that it launched
- merged, folded: of nodes: put together as "(lighter stacks)"; folded stacks: a text format
- lane: a track as the page draws it; packed: columns of numbers for the page
- held: of memory, mapped and not unmapped at the end; windows: equal parts of a process's time, in
  each of which memory grew or did not
- usage: what the kernel counted for a process: CPU time, switches, faults, bytes
- anchor: the operation that each step of a training loop begins with
- sampled: runs that were timed singly, drawn on separate streams; states: waits of threads
- early, first: of a stack's end: the walk stopped early, or followed frame pointers alone
"""
