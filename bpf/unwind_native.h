/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* From one native frame to its caller: by the file's table, else by the frame pointer. */
#ifndef SONDE_UNWIND_NATIVE_H
#define SONDE_UNWIND_NATIVE_H

#include "unwind_java.h"
#include "unwind_python.h"
#include "unwind_chain.h" /* reads frames as Python's are read */
#include "unwind_tables.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct return_instance___unwind {
	unsigned long stack;
	unsigned long orig_ret_vaddr;
	struct return_instance___unwind *next;
};
struct uprobe_task___unwind {
	struct return_instance___unwind *return_instances;
};
struct thread_struct___unwind {
	unsigned long fsbase;
};
struct mm_struct___unwind {
	unsigned long start_code;
	unsigned long start_stack;
};
struct task_struct___parent {
	struct mm_struct___unwind *mm;
	int tgid;
};
struct task_struct___unwind {
	struct mm_struct___unwind *mm;
	struct thread_struct___unwind thread;
	struct uprobe_task___unwind *utask;
	struct task_struct___parent *real_parent;
};
#pragma clang attribute pop

/* Where w->pc is the trampoline of a uretprobe: sets it to the return address that the kernel replaced. */
WALK_PART long see_through_trampoline(struct unwind_walk *w, walked_task task)
{
	if (!w)
		return 0;

	struct task_struct___unwind *more = (void *)task;
	struct uprobe_task___unwind *utask = BPF_CORE_READ(more, utask);
	struct return_instance___unwind *at;

	if (!utask)
		return false;
	at = BPF_CORE_READ(utask, return_instances);
	for (int i = 0; i < 16 && at; i++) {
		if (BPF_CORE_READ(at, stack) == w->sp - 8) {
			w->pc = BPF_CORE_READ(at, orig_ret_vaddr);
			return true;
		}
		at = BPF_CORE_READ(at, next);
	}
	return false;
}

/* To the caller by the frame pointer; `why`: the stop where that leads nowhere. */
WALK_PART long step_by_frame_pointer(struct unwind_walk *w, walked_task task, u32 why)
{
	if (!w)
		return 1;

	u64 saved[2];

	if (!w->bp || w->bp < w->sp || w->bp & 7) {
		w->stop = why;
		return 1;
	}
	if (on_stack(w, task, &saved[1], w->bp + 8) || on_stack(w, task, &saved[0], w->bp)) {
		w->stop = why;
		return 1;
	}
	if (!saved[1]) {
		w->stop = STOP_ENTRY;
		return 1;
	}
	w->sp = w->bp + 16;
	w->bp = saved[0];
	w->pc = saved[1];
	w->is_return = 1;
	w->is_first = 0;
	return 0;
}

#include "unwind_v8.h" /* steps by frame pointers, too */

/* A register of the first frame. */
static __always_inline u64 register_of(const struct unwind_walk *w, u32 reg)
{
	OPAQUE(reg); /* so that clang keeps the bound: the verifier does not know it */
	return w->registers[reg & 15];
}

/* From a frame that is left for an exception's handler to the handler's frame (CFA_HANDLER, rules.rs). */
WALK_PART long to_handler(struct unwind_walk *w, walked_task task, const struct unwind_rule *rule)
{
	if (!w || !rule)
		return 1;

	u64 sp = w->sp, pc = 0, bp = w->bp, at = 0;
	long failed = 0;

	if (rule->reg) {
		if (!w->is_first || rule->reg > 15) {
			w->stop = STOP_REGISTER;
			return 1;
		}
		pc = register_of(w, rule->reg);
		if (rule->offset) {
			sp = pc + rule->offset;
			failed = read_user(task, &pc, 8, pc);
		} else if (rule->extra) {
			failed = read_user(task, &pc, 8, pc + rule->extra);
		}
	} else {
		failed = read_user(task, &at, 8, w->bp + rule->rbp_offset) |
			 read_user(task, &sp, 8, w->bp + rule->offset) |
			 read_user(task, &pc, 8, w->bp + rule->extra);
		if (!failed) /* where the handler's caller has its rbp; 0: nobody has saved it */
			failed = read_user(task, &bp, 8, at ? at : w->bp);
	}
	if (failed) {
		w->stop = STOP_MEMORY;
		return 1;
	}
	if (sp < w->sp) {
		w->stop = STOP_NO_PROGRESS;
		return 1;
	}
	w->pc = pc;
	w->sp = sp;
	w->bp = bp;
	w->is_return = 0; /* about to begin there */
	w->is_first = 0;
	return 0;
}

/* From the system stack of a Go thread (g0) to the goroutine that it works for (CFA_GOROUTINE, rules.rs). */
WALK_PART long to_goroutine(struct unwind_walk *w, walked_task task, const struct unwind_rule *rule)
{
	if (!w || !rule)
		return 1;

	u64 g = 0, m = 0, its_m = 0, at[2] = {}, bp = 0;

	if (read_user(task, &g, 8, w->thread_base + rule->offset) ||
	    read_user(task, &m, 8, g + rule->reg) ||
	    read_user(task, &g, 8, m + ((u32)rule->extra >> 16)))
		goto unreadable;
	if (!g) { /* descheduled already: another thread may run it by now */
		w->stop = STOP_ENTRY;
		return 1;
	}
	if (read_user(task, &its_m, 8, g + rule->reg) ||
	    read_user(task, at, 16, g + (rule->extra & 0xffff)) ||
	    read_user(task, &bp, 8, g + rule->rbp_offset))
		goto unreadable;
	if (its_m != m || !at[0] || !at[1]) {
		w->stop = STOP_ENTRY;
		return 1;
	}
	w->sp = at[0];
	w->pc = at[1];
	if (rule->rbp == RBP_AT_CFA) {
		if (read_user(task, &w->pc, 8, w->sp))
			goto unreadable;
		w->sp += 8;
	}
	w->bp = bp;
	w->is_return = 1;
	w->is_first = 0;
	return 0;
unreadable:
	w->stop = STOP_MEMORY;
	return 1;
}

/* What native_step returns where another step is to be taken instead: called from unwind_step, as the stacks of
 * all functions of a chain of calls may have 512 bytes together, and before Linux 6.8 each counts for 32 or more. */
#define STEP_JAVA 2
#define STEP_V8 3

/* Puts one native frame and goes to its caller, or into an interpreter's frames; as unwind_step. `was_put`: 1:
 * other words were put instead of the frame; 0: none; -1: there was no room for them. */
WALK_PART long native_step(struct unwind_walk *w, walked_task task, struct unwind_memo *memo)
{
	if (!w || !memo)
		return 1;

	struct unwind_rule rule = {};
	u64 pc = w->pc, look_at = pc - (w->is_return ? 1 : 0), cfa, to, bp;
	u64 key = memo_key(w, look_at);
	bool is_known = recall(memo, key, &rule), is_loop;
	long was_put = 0;

	if (!is_known && !find_range(w, pc)) {
		if (w->is_return && see_through_trampoline(w, task)) {
			pc = w->pc;
			look_at = pc - 1;
			key = memo_key(w, look_at);
			if (!find_range(w, pc))
				goto unmapped;
			goto mapped;
		}
	unmapped:
		if (w->is_first) /* mapped since user space read the process's mappings */
			want(w->process.tgid);
		if (!put(w, pc))
			return 1;
		return step_by_frame_pointer(w, task, STOP_NO_MAPPING);
	}
mapped:
	w->entering = 0;
	if (!is_known) {
		if (w->range.page_count && !find_rule(w, look_at - w->range.bias, &rule)) {
			if (put(w, pc))
				w->stop = STOP_TABLE;
			return 1;
		}
		remember(memo, key, &rule); /* CFA_NONE where the file has no table */
	}
	if (rule.cfa == CFA_INTERPRETED)
		return STEP_JAVA;
	if (rule.cfa == CFA_V8)
		return STEP_V8;
	is_loop = in_evaluation(w, look_at);
	if (w->loop_before) {
		w->loop_before = 0;
		/* If the caller is the loop itself, it takes the frames of both. */
		if (!is_loop) {
			if (chain_begin(w, task) < 0)
				return 1;
			if (w->in_loop)
				return 0; /* this native frame comes after them */
		}
	}
	if (rule.cfa == CFA_LOOP) {
		w->loop_before = was_put = 1;
	} else if (is_loop) {
		if (w->process.runtime == RUNTIME_CHAIN)
			was_put = chain_begin(w, task);
		else
			w->in_loop = python_enter(w, task);
	} else if ((rule.cfa == CFA_RBP || (rule.cfa == CFA_NONE && w->is_return)) &&
		   in_v8(w, look_at))
		was_put = v8_put_frame(w, task, look_at, true);
	if (was_put < 0 || (!was_put && !w->in_loop && !put(w, pc)))
		return 1;
	switch (rule.cfa) {
	case CFA_GENERATED:
		want(w->process.tgid);
		return step_by_frame_pointer(w, task, STOP_NO_RULE);
	case CFA_NONE:
		/* V8's builtins make no frame where they need none: then the return address is at rsp. */
		if (w->is_first && in_v8(w, look_at) && !on_stack(w, task, &to, w->sp) &&
		    find_range(w, to)) {
			w->pc = to;
			w->sp += 8;
			w->is_return = 1;
			w->is_first = 0;
			return 0;
		}
		return step_by_frame_pointer(w, task, STOP_NO_RULE);
	case CFA_END:
		w->stop = STOP_ENTRY;
		return 1;
	case CFA_RSP:
	case CFA_LOOP:
		cfa = w->sp + rule.offset;
		break;
	case CFA_RBP:
		cfa = w->bp + rule.offset;
		break;
	case CFA_PLT:
		cfa = w->sp + rule.offset + ((pc & 15) >= rule.extra ? 8 : 0);
		break;
	case CFA_REGISTER:
		if (!w->is_first || rule.reg > 15) {
			w->stop = STOP_REGISTER;
			return 1;
		}
		cfa = register_of(w, rule.reg) + rule.offset;
		break;
	case CFA_RSP_DEREF:
	case CFA_RBP_DEREF:
		if (on_stack(w, task, &cfa,
			     (rule.cfa == CFA_RSP_DEREF ? w->sp : w->bp) + rule.offset)) {
			w->stop = STOP_MEMORY;
			return 1;
		}
		cfa += rule.extra;
		break;
	case CFA_SIGNAL:
		if (++w->signals > UNWIND_SIGNALS) {
			w->stop = STOP_SIGNALS;
			return 1;
		}
		cfa = w->sp;
		if (read_user(task, &w->bp, 8, cfa + rule.rbp_offset) ||
		    read_user(task, &w->sp, 8, cfa + rule.offset) ||
		    read_user(task, &w->pc, 8, cfa + rule.extra)) {
			w->stop = STOP_MEMORY;
			return 1;
		}
		w->is_return = 0; /* interrupted there, not called from there */
		w->is_first = 0;
		return 0;
	case CFA_HANDLER:
		return to_handler(w, task, &rule);
	case CFA_GOROUTINE:
		return to_goroutine(w, task, &rule);
	case CFA_UNSUPPORTED:
	default:
		w->stop = STOP_UNSUPPORTED;
		return 1;
	}
	if (w->entering && w->entering < cfa)
		python_of_caller(w, task);
	if (on_stack(w, task, &to, cfa - 8))
		goto unreadable;
	bp = w->bp;
	if (rule.rbp == RBP_AT_CFA || rule.rbp == RBP_AT_RBP) {
		u64 at = (rule.rbp == RBP_AT_CFA ? cfa : w->bp) + rule.rbp_offset;

		if (on_stack(w, task, &bp, at))
			goto unreadable;
	} else if (rule.rbp == RBP_UNKNOWN && !in_v8(w, look_at)) {
		bp = 0; /* not known. V8's builtins use rbp as a frame pointer alone */
	}
	/* A rule (CFA_RBP with `extra`) may lead to another stack, below this one; steps are bounded anyway. */
	if (cfa <= w->sp && !(rule.cfa == CFA_RBP && rule.extra)) {
		w->stop = STOP_NO_PROGRESS;
		return 1;
	}
	if (!to) {
		w->stop = STOP_ENTRY;
		return 1;
	}
	w->pc = to;
	w->sp = cfa;
	w->bp = bp;
	w->is_return = 1;
	w->is_first = 0;
	return 0;
unreadable:
	w->stop = STOP_MEMORY;
	return 1;
}

#endif
