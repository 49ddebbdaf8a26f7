/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What is known of a thread's waits: a line (struct wait_line, one cache line) that belongs to the threads whose
 * number modulo WAIT_LINES is its index; `tid` is the thread that uses it now. While one waits with it, all
 * waits of another are counted, as 1: nothing is mixed up.
 */
#ifndef SONDE_WAIT_LINES_H
#define SONDE_WAIT_LINES_H

#define WAIT_LINES 4096

enum line_state {
	LINE_IDLE,    /* the thread runs, or its wait is in the task's storage */
	LINE_NOTED,   /* its wait was not drawn: what is known of it stands here */
	LINE_RESTING, /* its wait began in a slice in which it rests (wait_rests.h); the same */
};

struct wait_line {
	u32 tid;
	u32 window;
	u32 waits; /* in this window */
	u32 state;
	u64 began_ns; /* where it rests by slice_clock, else CLOCK_MONOTONIC */
	u64 wake_ns;
	u32 waker_tgid;
	u32 waker_tid;
	u32 task_state; /* the thread's, as it left its CPU */
	u32 preempted;
	u32 is_heavy;	/* it rests in most slices */
	u32 rest_shift; /* log2 of as how many its wait counts for that */
	u64 unused;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, WAIT_LINES);
	__type(key, u32);
	__type(value, struct wait_line);
} wait_lines SEC(".maps");

/* The line for a thread; NULL where all waits are counted, of chosen processes alone. */
static __always_inline struct wait_line *line_of(u32 tid)
{
	const u32 at = tid % WAIT_LINES;

	return chosen_only ? NULL : bpf_map_lookup_elem(&wait_lines, &at);
}

/* The line that holds what is known of this thread's wait; NULL where none does. */
static __always_inline struct wait_line *noted_line_of(u32 tid)
{
	struct wait_line *line = line_of(tid);

	return line && line->tid == tid && line->state != LINE_IDLE ? line : NULL;
}

/* Takes what a line in this state holds. True once: for the wait's end or for the scan of all tasks. */
static __always_inline bool take_line(struct wait_line *line, u32 state)
{
	return __sync_val_compare_and_swap(&line->state, state, LINE_IDLE) == state;
}

/* Notes a wait that begins now, and is not drawn. */
static __always_inline void note_wait(struct wait_line *line, u32 task_state, bool preempted,
				      u64 now)
{
	line->began_ns = now;
	line->wake_ns = 0;
	line->waker_tgid = line->waker_tid = 0;
	line->task_state = task_state;
	line->preempted = preempted;
}

#endif
