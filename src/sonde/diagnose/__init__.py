# SPDX-License-Identifier: Apache-2.0
"""Why work on this node became slower: rows of the last minute in, an incident out.

Pure: no file, clock, socket or BPF. docs/design/diagnose.md describes how it decides.

Terms:
- moment: what the node did in one tick; window: the moments before and after a suspicion
- victim: the process that became slower; offender: who caused it
- lost time: seconds per second that the victim's threads no longer work; part: what they do in it
- case: a window with the lost time, as the causes judge it
- place: where in its code a thread waits or runs
- verdict: the causes of a slowdown, or a change that is no fault (not that of `analyze`)
- incident: a slowdown with its cause, offender and evidence; sign, early warning: one to come
- pace: how fast a job makes progress; RAS: NCCL's answers about its ranks
- look: the stacks of all ranks at one time
- stall: a job that makes no progress (in `analyze`, a device without a running kernel)
- child: the process that explains, fed with the records of `moments` and `job`
- piece: of work: a device call, or a wait for data that ended; sync: a wait for a write to disk
- symptom: what showed that a rank has stopped; facts: what files of the kernel report
- looked at closely: with its waits, and its stacks, recorded; the others' CPU time is known
- series: a number a tick of one process, such as a share of time in which it did not go on
- usual: where, or how much, before the change; family: the victim and its descendants
"""
