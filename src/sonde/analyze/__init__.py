# SPDX-License-Identifier: Apache-2.0
"""What a timeline means: pure functions of tables, without a clock, a file or a socket.

intervals   unions of intervals, and how much of them lies where
idle        what a device was in at each moment: kernels, collectives, copies, nothing
causes      the causes of waiting as data, each with a function that claims time for it
blame       one cause for each interval in which a device computed nothing
steps       the period of the work, without instrumentation
bound       the verdict, its evidence and one next step
"""
