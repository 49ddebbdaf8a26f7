# SPDX-License-Identifier: Apache-2.0
"""Collectors: each watches one concern of the node and hands over rows, tick by tick.

A collector knows what to attach and what its rows mean. It does not resolve addresses, does not
know processes by name and does not write: rows carry pids, stack ids and names of reasons or calls,
and `sonde.agent` joins them with what `sonde.resolve` knows.

Terms:
- drain: to take all that was gathered since the last time; batch: what that gives
- scan: a pass of a BPF iterator over all tasks or files
- device call: a call of a device API; device run: what the device then did
- ring: memory shared with the injected library, where it puts what it timed; it is read here
- carrier: a process that has the injected library
- launch site: the stack that launched a kernel
- slot: a pointer of a program through which it calls a device library
- site, place: where a probe is; put off: it cannot be placed or removed now
- source, poll, points: what answers, what it is asked and how often, where answers go
- gap: a time in which a source gave no answer
- turn: the part of a tick that one ring, or one poll, may take
- party, share: a user or container, and the part that it may take of what all share
- allowance, account, over: what a site or ring may cost, what a party owes, and one above it
- taken off: a probe that was removed as it cost too much; trial: of how much timing slows
- request, status: what the injected library is asked for (leave: detach), and what it does
  (yielded: another tool traces by CUPTI; left: it has detached)
"""
