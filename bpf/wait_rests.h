/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Slices of time in which a thread's waits are not looked at. Whatever is done at a switch, a thread that switches
 * ten thousand times a second pays for it each time: a clock, a draw, and two cache lines that wander between CPUs.
 * So a thread with more than HEAVY_WAITS in a window is heavy, and rests: of eight slices one, drawn at random,
 * is as it is for others, and what begins in it counts eight times. In the others the thread's line holds when and
 * how it left its CPU, and nothing else is done before the slice is over. A wait that is as long as a slice is
 * seen however it began, as it ends in a later one: it counts as 1.
 *
 * Slices are of ticks of the kernel, at their beginning and at their end, so that of waits shorter than
 * a slice one in eight is seen, however long a tick is. Such a thread's row is right to the part of its time
 * that differs between slices of 17 ms.
 */
#ifndef SONDE_WAIT_RESTS_H
#define SONDE_WAIT_RESTS_H

#include "wait_lines.h"

#define HEAVY_WAITS 2048 /* in a window */
#define REST_SHIFT 3	 /* log2: of how many slices it is awake in one */
#define SLICE_SHIFT 24	 /* 16.8 ms */
#define SLICE_NS (1ull << SLICE_SHIFT)

const volatile bool may_rest = false;
const volatile u64 tick_ns = 4000000; /* of the kernel's clock (CONFIG_HZ) */

/* Until which slice a thread rests. Apart from its line, which its CPU writes at each switch. */
struct rest {
	u32 tid;
	u32 until;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, WAIT_LINES);
	__type(key, u32);
	__type(value, struct rest);
} wait_rests SEC(".maps");

/* The clock of slices: as of the last tick, in ns since some moment. It is one load from memory. */
static __always_inline u64 slice_clock(void)
{
	return bpf_jiffies64() * tick_ns;
}

/* When a wait began that a line in this state holds (CLOCK_MONOTONIC). */
static __always_inline u64 began_of(const struct wait_line *line, u32 state, u64 now)
{
	return state == LINE_RESTING ? now - (slice_clock() - line->began_ns) : line->began_ns;
}

static __always_inline struct rest *rest_of(u32 tid)
{
	const u32 at = tid % WAIT_LINES;

	return may_rest ? bpf_map_lookup_elem(&wait_rests, &at) : NULL;
}

/* Whether a thread rests at a time of slice_clock. Global, so that the verifier follows it once in each program. */
__weak __noinline bool rests_at(u32 tid, u64 coarse_ns)
{
	const struct rest *it = rest_of(tid);

	return it && it->tid == tid && (u32)(coarse_ns >> SLICE_SHIFT) < it->until;
}

/* A thread that rests leaves its CPU: true where nothing else is to be done. */
static __always_inline bool rests_on(struct task_struct *task, u32 task_state, bool preempted,
				     u64 coarse_ns)
{
	u32 tid = task->pid;
	struct wait_line *line = rests_at(tid, coarse_ns) ? line_of(tid) : NULL;

	if (!line || line->tid != tid)
		return false;
	note_wait(line, task_state, preempted, coarse_ns);
	if (line->state != LINE_RESTING)
		line->state = LINE_RESTING;
	return true;
}

/* Whether a thread is awake in a slice: in one of each eight that follow each other, which nobody can foretell. */
static __always_inline bool is_awake(u32 tid, u32 slice)
{
	u32 of = ((slice >> REST_SHIFT) ^ tid * 0x9e3779b1U ^ (u32)stack_seed) * 0x9e3779b1U;

	return of >> (32 - REST_SHIFT) == (slice & ((1U << REST_SHIFT) - 1));
}

/* A new window begins for a thread's line: was it heavy in the one before? */
static __always_inline void weigh(struct wait_line *line, u32 window)
{
	u32 waits = line->waits << (line->is_heavy ? REST_SHIFT : 0);

	line->is_heavy = line->window + 1 == window && waits > HEAVY_WAITS;
	line->window = window;
	line->waits = 0;
}

/* A thread that is not resting now leaves its CPU. True where it rests from now on: its line holds this wait. */
static __always_inline bool begins_rest(struct wait_line *line, u32 tid, u32 task_state,
					bool preempted)
{
	struct rest *rest = line->is_heavy || line->waits > HEAVY_WAITS ? rest_of(tid) : NULL;
	u64 coarse_ns;
	u32 slice;

	line->rest_shift = 0;
	if (!rest)
		return false;
	line->is_heavy = true;
	coarse_ns = slice_clock();
	slice = coarse_ns >> SLICE_SHIFT;
	if (is_awake(tid, slice)) {
		line->rest_shift = REST_SHIFT;
		return false;
	}
	note_wait(line, task_state, preempted, coarse_ns);
	__sync_lock_test_and_set(&line->state, LINE_RESTING);
	rest->tid = tid;
	rest->until = slice + 1;
	return true;
}

#endif
