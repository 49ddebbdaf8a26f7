# SPDX-License-Identifier: Apache-2.0
"""The `sonde` command: one subcommand a file, each with `add_parser(subparsers)` and `run(args)`.

Only this package prints and exits. Its modules import nothing heavy at the top: every start of
`sonde` imports all of them to build the parser.

Terms:
- kind: a metric of `--metric`, as an enumeration (`ProfileKind`)
- mark: the status sign at the beginning of a line
- price: what a trace by CUPTI costs the traced process, before it is taken
- question: a query that a server answers; reduce: how an alert rule makes values one
- wasted: GPU time that was stalled or idle; productive: in which kernels ran
- held: GPU time in which an owner had memory there; unknown: not known who used it
"""
