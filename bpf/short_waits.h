/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Which waits are counted one by one. A thread that switches ten thousand times a second would pay for each
 * switch and wake-up what a row in a hash map costs, so of its short waits some, drawn at random, stand for
 * all: in a window of about a second the first 64 of a thread are counted, then one in 2, 4, 8 …, each as that
 * many. Waits of `long_wait_ns` or more are all counted, as 1: what is not drawn leaves its beginning in the
 * thread's line, and if it proves long it is counted at its end. So sums are unbiased, and each long wait is
 * there.
 *
 * The draw is made at the beginning, because stacks are taken there. A CPU on which many were counted in
 * this window counts fewer, and only waits of 2 or 4 ms and more are long there: its level is 1 or 2.
 *
 * A line (struct wait_line, one cache line) belongs to the threads whose number modulo SHORT_WAIT_LINES is its
 * index; `tid` is the thread that uses it now. While one waits with it, all waits of another are counted, as 1:
 * nothing is mixed up.
 */
#ifndef SONDE_SHORT_WAITS_H
#define SONDE_SHORT_WAITS_H

#define SHORT_WAIT_LINES 4096
#define SHORT_WAIT_WINDOW_SHIFT 30 /* 1.07 s */
#define SHORT_WAITS_SHIFT 6	   /* log2 of how many of a thread are counted in a window: 64 */
#define LEVEL_SHIFT 11		   /* log2 of the waits on a CPU for each level: 2048 */
#define MAX_LEVEL 2
#define FEWER_SHIFT 1 /* at each level half as many of a thread's waits are counted */
#define WAIT_STACKS_SHIFT                                                                          \
	5 /* log2 of how many stacks of many waits a CPU takes in a window before they are thinned */
#define STACKS_SHIFT 11	 /* the same of all stacks of waits, of threads with few waits too: 2048 */
#define WALK_NS_SHIFT 13 /* a walk counts as one of these more for each 8 us that it took */
#define MAX_DRAW_SHIFT 10

const volatile u64 long_wait_ns = 1000000;
const volatile u64 longest_short_wait_ns = 4000000; /* a wait this long is long at every level */

enum line_state {
	LINE_IDLE,  /* the thread runs, or its wait is in the task's storage */
	LINE_NOTED, /* its wait was not drawn: what is known of it stands here */
};

struct wait_line {
	u32 tid;
	u32 window;
	u32 waits; /* in this window */
	u32 state;
	u64 began_ns;
	u64 wake_ns;
	u32 waker_tgid;
	u32 waker_tid;
	u32 task_state; /* the thread's, as it left its CPU */
	u32 preempted;
	u64 unused[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SHORT_WAIT_LINES);
	__type(key, u32);
	__type(value, struct wait_line);
} wait_lines SEC(".maps");

/* How many waits and stacks a CPU counts. */
struct wait_pressure {
	u64 not_drawn; /* waits that others stand for, since the start */
	u32 window;
	u32 counted;	 /* waits, one by one, in this window */
	u32 stacks;	 /* of threads with many waits, taken in this window */
	u32 every_stack; /* of any thread, taken in this window, and what long walks count for */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct wait_pressure);
} wait_pressure SEC(".maps");

/* The line for a thread; NULL where all waits are counted, of chosen processes alone. */
static __always_inline struct wait_line *line_of(u32 tid)
{
	const u32 at = tid % SHORT_WAIT_LINES;

	return chosen_only ? NULL : bpf_map_lookup_elem(&wait_lines, &at);
}

/* The wait_pressure of this CPU in this window; NULL where all waits are counted. */
static __always_inline struct wait_pressure *pressure_now(u64 now)
{
	const u32 window = now >> SHORT_WAIT_WINDOW_SHIFT, first = 0;
	struct wait_pressure *it;

	if (chosen_only)
		return NULL;
	it = bpf_map_lookup_elem(&wait_pressure, &first);
	if (it && it->window != window) {
		it->window = window;
		it->counted = it->stacks = it->every_stack = 0;
	}
	return it;
}

static __always_inline u32 level_of(const struct wait_pressure *it)
{
	u32 level = it ? it->counted >> LEVEL_SHIFT : 0;

	return level < MAX_LEVEL ? level : MAX_LEVEL;
}

/* Whether a wait counts as 1, whatever was drawn; asked at its end. */
static __always_inline bool is_long(u64 ns, u64 now)
{
	u64 from_ns;

	if (ns < long_wait_ns)
		return false;
	from_ns = long_wait_ns << level_of(pressure_now(now));
	return ns >= from_ns || ns >= longest_short_wait_ns;
}

/*
 * One in 2^result is drawn of what comes after `number` times as many as are all taken: the number of bits of
 * `number`. So about as many are drawn each time the count doubles.
 */
static __always_inline u32 octave(u32 number)
{
	u32 shift = 0;

	while (number && shift < MAX_DRAW_SHIFT) {
		number >>= 1;
		shift++;
	}
	return shift;
}

/* True for one in 2^shift. */
static __always_inline bool one_in(u32 shift)
{
	return !shift || !(bpf_get_prandom_u32() & ((1U << shift) - 1));
}

/*
 * A thread with this line (line_of) leaves its CPU: as how many waits this one counts. 0: others stand for it,
 * and the line holds what is known of it.
 */
static __always_inline u32 drawn(struct wait_line *line, u32 tid, u32 task_state, bool preempted,
				 u64 now)
{
	const u32 window = now >> SHORT_WAIT_WINDOW_SHIFT;
	struct wait_pressure *pressure;
	u32 shift;

	if (!line)
		return 1;
	if (line->tid != tid) {
		if (line->state == LINE_NOTED) /* another thread waits with it */
			return 1;
		line->tid = tid;
		line->window = 0;
	}
	if (line->window != window) {
		line->window = window;
		line->waits = 0;
	}
	pressure = pressure_now(now);
	if (!pressure)
		return 1;
	shift = octave(line->waits++ >> (SHORT_WAITS_SHIFT - FEWER_SHIFT * level_of(pressure)));
	if (one_in(shift)) {
		pressure->counted++;
		return 1U << shift;
	}
	pressure->not_drawn++;
	line->began_ns = now;
	line->wake_ns = 0;
	line->waker_tgid = line->waker_tid = 0;
	line->task_state = task_state;
	line->preempted = preempted;
	__sync_lock_test_and_set(&line->state, LINE_NOTED);
	return 0;
}

/*
 * The weight of a stack that is due, of a wait that counts as `times`; 0: it is not taken. Of threads with many
 * waits a CPU takes fewer stacks where it took many in this window. Where it took very many of any threads, it
 * takes fewer of all: a walk delays what runs next, and a thousand threads with few waits each have as many
 * stacks as one with many. Global, so that the verifier follows it once in each program.
 */
__weak __noinline u32 weight_of_stack(u32 weight, u32 times, u64 now)
{
	struct wait_pressure *pressure = weight ? pressure_now(now) : NULL;
	u32 shift, of_all;

	if (!pressure)
		return weight;
	shift = times > 1 ? octave(pressure->stacks >> WAIT_STACKS_SHIFT) : 0;
	of_all = 2 * octave(pressure->every_stack >> STACKS_SHIFT);
	if (of_all > MAX_DRAW_SHIFT)
		of_all = MAX_DRAW_SHIFT;
	if (shift < of_all)
		shift = of_all;
	if (!one_in(shift))
		return 0;
	pressure->every_stack++;
	if (times > 1)
		pressure->stacks++;
	return weight * times << shift;
}

/*
 * A walk took so long. A program decides how far apart its frames lie, and the walk delays what runs next and is
 * charged to nobody's quota: so on each CPU time is bounded, not the number of stacks. Global, so that what it
 * needs of the stack is not its callers'.
 */
__weak __noinline int charge_walk(u64 walk_ns, u64 now)
{
	struct wait_pressure *pressure = pressure_now(now);

	if (pressure)
		pressure->every_stack += walk_ns >> WALK_NS_SHIFT;
	return 0;
}

/* Whether a thread is known to be watched, without a look at `targets`: its waits were drawn in this window. */
static __always_inline bool drawn_lately(u32 tid, u64 now)
{
	struct wait_line *line = filter_targets ? line_of(tid) : NULL;

	return line && line->tid == tid && line->window == (u32)(now >> SHORT_WAIT_WINDOW_SHIFT);
}

/* The line that holds what is known of this thread's wait; NULL where none does. */
static __always_inline struct wait_line *noted_line_of(u32 tid)
{
	struct wait_line *line = line_of(tid);

	return line && line->tid == tid && line->state == LINE_NOTED ? line : NULL;
}

/* Takes what a line holds. True once: for the wait's end or for the scan of all tasks. */
static __always_inline bool take_line(struct wait_line *line)
{
	return __sync_val_compare_and_swap(&line->state, LINE_NOTED, LINE_IDLE) == LINE_NOTED;
}

#endif
