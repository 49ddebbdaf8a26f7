/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Taking a stack: walk it (unwind.h), use its hash as its id, keep the frames once.
 *
 * Each object that includes this declares a `stacks` map; those of one recording share that of
 * unwind.bpf.c. The caller gives the scratch memory, because what is safe differs: one for each CPU where
 * nothing can interleave (perf_event, sched_switch), several where the program can be preempted (uprobes:
 * walk_scratch.h).
 */
#ifndef SONDE_STACK_H
#define SONDE_STACK_H

#ifndef SONDE_MAX_STACKS
#define SONDE_MAX_STACKS 8192
#endif
#define SONDE_TAKES_STACKS (SONDE_MAX_STACKS > 1)

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SONDE_MAX_STACKS);
	__type(key, u64);
	__type(value, struct sonde_stack);
} stacks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LOSS_MAX);
	__type(key, u32);
	__type(value, u64);
} losses SEC(".maps");

static __always_inline void count_loss(u32 which)
{
	u64 *n = bpf_map_lookup_elem(&losses, &which);

	if (n)
		(*n)++;
}

/*
 * Which of a thread's events get a stack. The chance is set before the event's size (duration, bytes) is
 * known, and the event counts for its inverse, so sums of weights are unbiased. A thread gets about one stack
 * in `stack_gap_ns` among events of the same kind as the one before, and as many among events of another kind
 * than that: a rare kind between many of another surely gets one, and sums have little variance. A thread
 * whose kind changes with every event costs no more.
 */
struct stack_chance {
	u64 taken_ns;	/* last stack */
	u64 last_ns;	/* last event */
	u64 changed_ns; /* last event of another kind than the one before */
	u64 mean_ns;	/* mean gap between events, lately */
	u64 mean_changed_ns;
	s32 kind; /* of the last event */
};

const volatile u64 stack_gap_ns = 10000000;
const volatile u32 stack_divisor_max = 1024; /* one event in this many gets a stack at least */

/* Adds an event to a moving mean of the gaps between events. Returns how many come in a stack_gap_ns. */
static __always_inline u64 note_gap(u64 *mean_ns, u64 *last_ns, u64 now)
{
	u64 gap = *last_ns ? now - *last_ns : 0;

	*last_ns = now;
	*mean_ns = *mean_ns ? *mean_ns + (gap >> 3) - (*mean_ns >> 3) : gap;
	return *mean_ns ? stack_gap_ns / *mean_ns : 0;
}

/* The weight with which this event gets a stack, 0 for none. */
static __always_inline u32 stack_weight(struct stack_chance *c, s32 kind, u64 now)
{
	u64 divisor = note_gap(&c->mean_ns, &c->last_ns, now);

	if (kind != c->kind) {
		c->kind = kind;
		divisor = note_gap(&c->mean_changed_ns, &c->changed_ns, now);
	}
	if (now - c->taken_ns < stack_gap_ns && divisor > 1) {
		if (divisor > stack_divisor_max)
			divisor = stack_divisor_max;
		if (bpf_get_prandom_u32() % (u32)divisor)
			return 0;
	} else {
		divisor = 1;
	}
	c->taken_ns = now;
	return divisor;
}

/* Takes the kernel frames of the current task; returns how many. */
static __always_inline u32 walk_kernel(void *ctx, struct sonde_stack *s)
{
	long n = bpf_get_stack(ctx, s->kernel, sizeof(s->kernel), 0);

	return n > 0 ? (u32)n / sizeof(u64) : 0;
}

/* One step of the hash. */
static __always_inline u64 mix(u64 h, u64 v)
{
	h = (h ^ v) * 0x9e3779b97f4a7c15ULL;
	return h ^ (h >> 29);
}

/* Random, the same for all objects that user space loads together: a user who knew it could make a stack
 * with the id of another process's, whose rows would then show that user's frames. */
const volatile u64 stack_seed = 0;

/* What the hash of a stack begins with: the process, which started at `start_ns`, and the program that it
 * executes, since after an exec the same addresses are other functions. All its threads have the same one. */
static __always_inline u64 seed_of(struct task_struct *task, u64 start_ns)
{
	return mix(start_ns, task->self_exec_id) ^ (u32)task->tgid;
}

/* Hash of the frames and of the program whose addresses they are (`seed`, from seed_of()). In a deep recursion a whole stack
 * may be the same as the tail of another: they have separate entries, since user space removes them at
 * different times. Global, so that the verifier follows it once in each program (WALK_PART in unwind_state.h);
 * what stores the stack cannot be: before Linux 6.2 no value of a map may come from an argument. */
__weak __noinline u64 stack_hash(const struct sonde_stack *s, u64 seed)
{
	u64 h;

	if (!s)
		return 0;
	h = mix(mix(stack_seed, seed) ^ s->next,
		(u64)s->is_tail << 48 | (u64)s->kernel_len << 32 | s->user_len << 8 | s->stop);

	for (u32 i = 0; i < SONDE_KERNEL_FRAMES; i++) {
		if (i >= s->kernel_len)
			break;
		h = mix(h, s->kernel[i]);
	}
	for (u32 i = 0; i < SONDE_USER_FRAMES; i++) {
		if (i >= s->user_len)
			break;
		h = mix(h, s->user[i]);
	}
	return h ? h : 1;
}

/* Stores a piece of a stack under its hash. Returns the hash, 0 when there was no room. */
static __always_inline u64 stack_keep(const struct sonde_stack *s, u64 seed)
{
	u64 id = stack_hash(s, seed);

	if (bpf_map_lookup_elem(&stacks, &id))
		return id;
	if (bpf_map_update_elem(&stacks, &id, s, BPF_ANY)) {
		count_loss(LOSS_STACK_MAP_FULL);
		return 0;
	}
	return id;
}

#if SONDE_TAKES_STACKS
#include "unwind.h"

struct stack_pieces {
	struct unwind_walk *walk;
	u64 seed;
	u64 id;
};

/* Stores the pieces of a walk, the last one first: each has the id of the one behind it. */
static long keep_piece(u32 i, void *arg)
{
	struct stack_pieces *p = arg;
	u32 piece = p->walk->piece - i; /* wraps around below 0: there are no more */
	struct sonde_stack *s;

	if (piece >= UNWIND_PIECES)
		return 1;
	s = &p->walk->pieces[piece & (UNWIND_PIECES - 1)];
	s->user_len = i ? SONDE_USER_FRAMES : p->walk->slot;
	s->next = p->id;
	s->stop = p->walk->stop;
	s->is_tail = piece != 0;
	if (piece)
		s->kernel_len = 0;
	p->id = stack_keep(s, p->seed);
	return p->id == 0;
}

/* Stores what was walked. Returns the id of its first piece, 0 when there was no room. */
static __always_inline u64 keep_walk(struct unwind_walk *w, u64 seed)
{
	struct stack_pieces pieces = {.walk = w, .seed = seed};

	if (has_loop() && w->piece)
		bpf_loop(w->piece + 1, keep_piece, &pieces, 0);
	else /* a walk by frame pointers alone fills no more than one */
		keep_piece(0, &pieces);
	return pieces.id;
}

/* The id of the current task's stack, 0 when there was no room. `kernel`, `user`: whether it has such a part.
 * `first`: a user frame to put in front, 0 for none. */
static __always_inline u64 stack_of(void *ctx, struct unwind_walk *w, u64 seed, bool kernel,
				    bool user, u64 first)
{
	struct sonde_stack *s = &w->pieces[0];

	s->kernel_len = kernel ? walk_kernel(ctx, s) : 0;
	w->piece = 0;
	w->slot = 0;
	w->stop = STOP_ENTRY;
	if (user) {
		unwind(ctx, w, bpf_get_current_task_btf(), first);
		if (!w->piece && w->slot <= (first ? 1 : 0))
			count_loss(LOSS_USER_STACK);
	}
	return keep_walk(w, seed);
}

/* The same, with a kernel part unless a user frame is put in front: then it is the stack of a device call. */
static __always_inline u64 stack_take(void *ctx, struct unwind_walk *w, u64 seed, bool user,
				      u64 first)
{
	return stack_of(ctx, w, seed, !first, user, first);
}
#endif /* SONDE_TAKES_STACKS */

#endif
