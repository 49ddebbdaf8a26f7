# SPDX-License-Identifier: Apache-2.0
"""Frozen records that packages hand to one another. They import nothing of ours and do nothing.

Terms:
- track: a thread, or a stream of a device, in a timeline
- record: of a timeline: what it was made from, a capture of Sonde or another tool's trace
- traced time: the windows of a record in which every operation of a device was recorded
- total: a sum over a thread where not every interval is kept
- run: one kernel, copy or fill as a device ran it; program run: from start to end
- asked for: of a run: launched by a call of this thread
- location: code as 'function file:line'; own code: the program's, no library's
- kind: of a profile (`ProfileKind`), with another spelling in the column `kind` of files
- waker: the thread that ended a wait; in columns its track plus 1, 0 unknown
- origin: whose code a file holds, by its folder
- note: a record of the kernel about whose a process is; of a verdict: a sentence on its limits
- phase: a part of the time with work of one kind: the steps, or what lies beside them
- computing: the share of time with a kernel running; of a thread: in calls that wait for its
  device; gain: the share of time that an advice saves at most
- first, early, note: how a stack ended (`StackEnd`): by frame pointers alone, cut, or noted
"""
