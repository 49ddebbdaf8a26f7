# SPDX-License-Identifier: Apache-2.0
"""Typed queries over captures, answered by an embedded SQL engine (DuckDB over Arrow).

`capture` reads a `.sonde` file into columnar tables, `session` opens them in the engine, `queries`
and the modules named after a subject (`memory`, `device_runs`, ...) return typed rows.

Terms:
- session: a capture in the engine; store: files of many nodes (`stored`); node: a machine there
- selection: which rows a question reads: a time, nodes, processes, kinds, owners (`stored`)
- dictionary: a table that others refer to: stack, frame, process, thread
- about: what a chunk's metadata reports of its capture; ordinal: a device's number in its process
- run: one kernel, copy or fill as a device ran it, timed by chance and weighted
- own frame: the innermost frame that is not of the kernel or the C library
- part: what a wait was for, by the stacks of some of the waits
- role: what a stack shows its thread to do; location: 'function file:line'
- slot, bin: a stretch of time that values are summed over; tick: one such stretch of the recorder
- exchange: a kernel by which ranks send data to one another; piece: work between two exchanges
- held, productive, stalled, idle: of GPU time: see `stored_use`
- sums, summed: the view with pre-summed samples, and the table of their files
- budget: memory that reading may still take; conformed: brought to Sonde's columns
- traced: in a window, in which all runs were timed; singly, SINGLE: runs that chance chose
- timed: whose time on the device was measured; shared: of a process whose device others use, too
- in_capture: in code that captures CUDA graphs again and again (`graph_builders`)
- user's code: the program's Python; without any, that of packages, then the standard library
- lost order: runs whose time came too late, or was out of bounds (`abi/inject.h`)
- grown: bytes mapped less those unmapped; reserved: mapped without access rights
"""
