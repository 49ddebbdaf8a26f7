/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Walks the user stack of a task in the kernel: by unwind tables, by frame pointers where code has no
 * tables, and by an interpreter's own frames (CPython, HotSpot, V8, Ruby, PHP).
 *
 * One source for every program type: each object that includes this brings its own scratch memory
 * and shares the maps, which unwind.bpf.c owns. The loop is bpf_loop (5.17), so no tail calls are
 * needed and one walk is one program; older kernels get frame pointers alone. An object that walks other tasks
 * than the current one defines SONDE_READS_OTHERS (dump.bpf.c): it reads memory by other_memory.h, and has no walk
 * by frame pointers.
 */
#ifndef SONDE_UNWIND_H
#define SONDE_UNWIND_H

#include "unwind_state.h"

enum bpf_func_id___with_loop {
	BPF_FUNC_loop___with_loop = 181,
};

/* Whether tables are used and this kernel has bpf_loop. If not, the verifier skips what calls it. */
static __always_inline bool has_loop(void)
{
	return unwind_by_tables &&
	       bpf_core_enum_value_exists(enum bpf_func_id___with_loop, BPF_FUNC_loop___with_loop);
}

#if defined(__TARGET_ARCH_x86)
#include "unwind_native.h"

/* One frame (or a part of one). As bpf_loop wants it: 0 goes on, 1 ends the walk. So do all steps return. */
static long unwind_step(u32 i, void *arg)
{
	struct unwind_context *c = arg;
	long stops;

	if (!c->walk->in_loop) {
		stops = native_step(c->walk, c->task, c->memo);
		if (stops == STEP_JAVA)
			stops = java_step(c->walk, c->task);
		else if (stops == STEP_V8)
			stops = v8_step(c->walk, c->task);
		return stops && !chain_has_rest(c->walk);
	}
	if (c->walk->process.runtime == RUNTIME_CHAIN)
		return chain_step(c->walk, c->task) != 0;
	return python_step(c->walk, c->task) != 0;
}

/*
 * The parent's entry, where a process still runs its parent's program: since the fork its stack begins at the
 * same address, which each exec chooses at random. NULL: none. Without that randomization (setarch -R) a child that
 * has executed another program may begin there, too; start_walk then compares start_code, which is equal for
 * position-independent programs: such a child is walked by its parent's tables until its own entry is loaded.
 */
static __always_inline struct unwind_process *inherited(struct task_struct___unwind *task)
{
	struct task_struct___parent *parent = BPF_CORE_READ(task, real_parent);
	unsigned long began = BPF_CORE_READ(task, mm, start_stack);
	u32 tgid = BPF_CORE_READ(parent, tgid);

	if (!began || BPF_CORE_READ(parent, mm, start_stack) != began)
		return NULL;
	return bpf_map_lookup_elem(&unwind_processes, &tgid);
}

/* Sets `w` to the task's user registers; false, with w->stop, where tables cannot be used. */
static __always_inline bool start_walk(struct unwind_walk *w, struct task_struct *task)
{
	struct task_struct___unwind *more = (void *)task;
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
	u32 tgid = task->tgid;
	struct unwind_process *process = bpf_map_lookup_elem(&unwind_processes, &tgid);

	w->has_range = w->is_return = w->in_loop = w->next_known = w->signals = 0;
	w->entering = w->loop_before = w->in_first_loop = w->is_rest = 0;
	w->is_first = 1;
	window_clear(&w->stack, WINDOW_OF_STACK);
	if (!process) {
		want(tgid);
		process = inherited(more);
		if (!process) {
			w->stop = STOP_NO_PROCESS;
			return false;
		}
		w->process = *process;
		w->process.tgid = tgid;
	} else {
		w->process = *process;
		process->walks++;
	}
	if (w->process.tgid != tgid ||
	    w->process.start_code != BPF_CORE_READ(more, mm, start_code)) {
		w->stop = STOP_EXEC;
		want(tgid);
		return false;
	}
	w->pc = regs->ip;
	w->sp = regs->sp;
	w->bp = regs->bp;
	if (!w->pc || w->pc >> 63) {
		w->stop = STOP_REGISTERS;
		return false;
	}
	w->registers[0] = regs->ax;
	w->registers[1] = regs->dx;
	w->registers[2] = regs->cx;
	w->registers[3] = regs->bx;
	w->registers[4] = regs->si;
	w->registers[5] = regs->di;
	w->registers[6] = w->bp;
	w->registers[7] = w->sp;
	w->registers[8] = regs->r8;
	w->registers[9] = regs->r9;
	w->registers[10] = regs->r10;
	w->registers[11] = regs->r11;
	w->registers[12] = regs->r12;
	w->registers[13] = regs->r13;
	w->registers[14] = regs->r14;
	w->registers[15] = regs->r15;
	w->thread_base = BPF_CORE_READ(more, thread.fsbase);
	return true;
}

#endif /* __TARGET_ARCH_x86 */

/* By the kernel's own walk, which can walk the current task alone: none with SONDE_READS_OTHERS. */
static __always_inline void walk_by_frame_pointers(void *ctx, struct unwind_walk *w)
{
#ifndef SONDE_READS_OTHERS
	struct sonde_stack *s = &w->pieces[0];
	u32 slot = w->slot;
	long n;

	if (slot > 1)
		return;
	n = bpf_get_stack(ctx, &s->user[slot], sizeof(s->user) - sizeof(s->user[0]),
			  BPF_F_USER_STACK);
	if (n > 0)
		w->slot = slot + (u32)n / sizeof(u64);
#endif
}

/* Walks the user stack of `task` into w->pieces. `first`: a frame to put in front, 0 for none. */
static __always_inline void unwind(void *ctx, struct unwind_walk *w, struct task_struct *task,
				   u64 first)
{
	w->piece = 0;
	w->slot = 0;
	if (first) {
		w->pieces[0].user[0] = first;
		w->slot = 1;
	}
#if defined(__TARGET_ARCH_x86)
	if (has_loop()) {
		u64 began = cost_words ? bpf_ktime_get_ns() : 0;

		const u32 only = 0; /* `first` is a frame here */
		struct unwind_context c = {.walk = w, .task = walked(task)};

		/* Never NULL: it is the map's one key. */
		c.memo = bpf_map_lookup_elem(&unwind_memo, &only);
		if (c.memo && start_walk(w, task)) {
			w->stop = STOP_DEPTH;
			bpf_loop(unwind_steps, unwind_step, &c, 0);
		} else if (w->stop == STOP_NO_PROCESS || w->stop == STOP_EXEC) {
			walk_by_frame_pointers(ctx, w);
		}
		if (cost_words && w->piece * SONDE_USER_FRAMES + w->slot >= cost_words)
			count_cost(began);
		count_stop(w->stop);
		return;
	}
#endif
	w->stop = STOP_NO_HELPER;
	walk_by_frame_pointers(ctx, w);
	count_stop(w->stop);
}

#endif
