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
- carrier: a process that has the injected library; generation: which of its rings, in order
- copy, set: a transfer of device memory, and filling it with a value (cudaMemcpy, cudaMemset)
- library, in modules named device_* (but device_calls) and inject_*: the injected library
- launch site: the stack that launched a kernel
- block: N consecutive launches, of which one is chosen to be timed; weight: how many it stands for
- handed out: a function whose address a program gets from its library (cuGetProcAddress)
- watched: of the processes that a recording is of
- slot: a pointer of a program through which it calls a device library
- site, place: where a probe is; hit: one run of it; put off: it cannot be placed or removed now
- spare: what one turn did not use of its budget, for the next
- source, poll, points: what answers, a query and how often it runs, where answers go
- look: one reading of something that is read again and again (mappings, a ring's state, run queues)
- charged: with its cost held against a budget
- gap: a time in which a source gave no answer; the events that mark it are signal_lost and
  signal_back
- turn: the part of a tick that one ring, or one poll, may take
- party, share: a user or container, and the part that it may take of what all share
- peer: who is at the other end of the socket that a thread waits on; candidate: one of several that
  it may wait for; client: who connected to it, and asks
- group: a control group; hierarchy: the number of its cgroup hierarchy (0: version 2)
- excess: cost so far less what was allowed meanwhile; account: the excess of a party at a site
- allowance, over: what a site or ring may cost, and a party whose account is above it
- taken off: a probe that was removed as it cost too much; trial: of how much timing slows
- request, status: what the agent wants of the injected library (leave: detach), and what it does
  (yielded: another tool traces by CUPTI; left: it has detached)
"""
