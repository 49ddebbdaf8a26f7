# SPDX-License-Identifier: Apache-2.0
"""What a timeline means: pure functions of tables, without a clock, a file or a socket.

intervals   unions of intervals, and how much of them lies where
stalls      what a device was in at each moment: kernels, collectives, copies, nothing
causes      the causes of waiting as data, each with a function that claims time for it
blame       one cause for each interval in which a device computed nothing
steps       the period of the work, without instrumentation
bound       the verdict, its evidence and one next step

Terms:
- track: a thread, or a stream of a device; total: an exact or estimated sum over one thread
- record: what a timeline was made from: a capture of Sonde, or another tool's trace
- stall: a stretch of a device's traced time without a running kernel; blame: its cause
- late: a thread that launched only after the device had run out of work
- launch path: a framework's dispatch, the runtime and the driver, on the way to a device
- bare call: a call of the device that no function on the launch path encloses
- run: one kernel or copy as a device ran it; asked for: launched by a call of this thread
- claim: time of a thread that a cause explains
- window: the traced time of a device, or the length of a record in ns
- slot: a time bin that ranks are compared in; check: raises where the caller wants no answer now
- place, location: code as 'function file:line'; own code: the program's, no library's
- turns: threads of a process that wait for one another in turn, and so launch like one thread
- runs timed singly: a sample of a device's runs, each timed without a trace of the rest
- bound: what the work is limited by; step: one iteration of the training loop
- per, cost, certain: of a difference: its unit, its share of the unit, larger than noise
- anchor: the operation that each step begins with; piece: operations between two of them
- computing: with a kernel running; of a thread, in calls that wait for its device
- straggler: a rank that others wait for; phase: the steps, or what lies beside them
"""
