# SPDX-License-Identifier: Apache-2.0
"""The `sonde` command: one subcommand a file, each with `add_parser(subparsers)` and `run(args)`.

Only this package prints and exits. Its modules import nothing heavy at the top: every start of
`sonde` imports all of them to build the parser.

Terms:
- kind: a metric of `--metric`, as an enumeration (`ProfileKind`)
- mark: the status sign at the beginning of a line
- examine, finding: to check this machine or its devices, and the result of one check (`host`)
- price: the estimated cost of a trace by CUPTI for the traced process, shown before it begins
- question: a query that a server answers; reduce: how an alert rule makes values one
- recording: what `sonde record` does, or its result; capture: the file of one
- the library: the injected library for device time; to load: to bring it into a running process
- kept: of an incident: in a file of `sonde diagnose --keep`, with the moments it was found in
- unread: of processes: whose mappings or files could not be read
- party (fleet): an aggregator or the collector; trial: a fleet on one machine, to try it out
- held: GPU time in which an owner had memory there; productive: of it, in which kernels ran;
  stalled: the rest, of an owner that used the device in that slot; idle: of one that did not;
  wasted: stalled and idle; unknown: not known who used it
- a token for `read`: one with that scope (`server.tokens`); lost: of a rank: time that the others
  waited for it, in each step or second"""
