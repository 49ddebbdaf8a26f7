# SPDX-License-Identifier: Apache-2.0
"""The `sonde` command: one subcommand a file, each with `add_parser(subparsers)` and `run(args)`.

Only this package prints and exits. Its modules import nothing heavy at the top: every start of
`sonde` imports all of them to build the parser.

Terms:
- kind: a metric of `--metric`, as an enumeration (`ProfileKind`)
- mark: the status sign at the beginning of a line
- price: what a trace by CUPTI costs the traced process, before it is taken
"""
