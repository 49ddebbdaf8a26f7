/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * CPython's own frames (3.10 to 3.14): the thread's newest one is found through its thread state, and
 * each evaluation loop on the native stack takes as many of them as it has run.
 */
#ifndef SONDE_UNWIND_PYTHON_H
#define SONDE_UNWIND_PYTHON_H

#include "unwind_state.h"

/* Of the code of an evaluation loop, until its frame is known to the thread. */
#define EVAL_ENTRY_BYTES 192

static __always_inline bool in_evaluation(const struct unwind_walk *w, u64 pc)
{
	const struct unwind_python *p = &w->process.python;

	return w->process.has_python &&
	       ((pc >= p->eval[0] && pc < p->eval[1]) || (pc >= p->eval[2] && pc < p->eval[3]));
}

/* The newest Python frame of the thread; false where it has none that we can reach. */
static __always_inline bool python_enter(struct unwind_walk *w, struct task_struct *task)
{
	const struct unwind_python *p = &w->process.python;
	u64 values = w->thread_base, thread = 0, frame = 0;
	u32 key[2];

	if (w->python_known)
		return w->python_frame != 0;
	w->python_known = 1;
	w->python_frame = 0;
	if (!values || read_user(task, key, sizeof(key), p->tss_at) || !key[0])
		goto none;
	if (p->tsd_deref != ABSENT) {
		if (read_user(task, &values, 8, values + p->tsd_deref))
			goto none;
	} else if (key[1] >= 32) {
		goto none;
	}
	if (read_user(task, &thread, 8, values + p->tsd + key[1] * p->tsd_stride) || !thread)
		goto none;
	if (read_user(task, &frame, 8, thread + p->frame_of_thread))
		goto none;
	if (p->frame_of_cframe != ABSENT) {
		if (w->is_first && w->pc - p->eval[0] < EVAL_ENTRY_BYTES)
			w->entering = frame;
		if (read_user(task, &frame, 8, frame + p->frame_of_cframe))
			goto none;
	}
	w->python_frame = frame;
	if (frame)
		return true;
none:
	count_stop(PYTHON_NO_THREAD);
	return false;
}

/*
 * An evaluation loop of 3.11 or 3.12 that is just being entered: its record in its own frame is told
 * to the thread before it is filled in. What counts is its caller's.
 */
static __always_inline void python_of_caller(struct unwind_walk *w, struct task_struct *task)
{
	u16 at = w->process.python.frame_of_cframe;
	u64 caller, frame;

	if (!read_user(task, &caller, 8, w->entering + at + 8) &&
	    !read_user(task, &frame, 8, caller + at)) {
		w->python_frame = frame;
		w->in_python = 0; /* it has none of its own yet */
	}
}

#define FIELD(w, type, offset)                                                                     \
	(*(type *)&(w)->frame[(offset) <= PYTHON_FRAME_BYTES - 8 ? (offset) : 0])

/* One Python frame; the last of an evaluation loop leads back to native frames. */
static __always_inline long python_step(struct unwind_walk *w, struct task_struct *task)
{
	const struct unwind_python *p = &w->process.python;
	u16 at_previous = p->previous, at_code = p->code, at_instruction = p->instruction;
	u16 at_owner = p->owner, at_entry = p->entry;
	u64 code, place_in_code, previous;
	bool is_last = false;
	u32 line = 0;

	if (!w->python_frame) {
		count_stop(PYTHON_NO_FRAME);
		w->in_python = 0;
		return 0;
	}
	if (read_user(task, w->frame, sizeof(w->frame), w->python_frame)) {
		count_stop(PYTHON_MEMORY);
		w->python_frame = 0;
		w->in_python = 0;
		return 0;
	}
	previous = FIELD(w, u64, at_previous);
	w->python_frame = previous;
	if (at_owner != ABSENT) {
		if (FIELD(w, u8, at_owner) >= p->owner_entry) {
			w->in_python = 0;
			return 0;
		}
	} else {
		is_last = at_entry == ABSENT || FIELD(w, u8, at_entry);
	}
	code = FIELD(w, u64, at_code) & ~7ULL;
	if (p->instruction_is_index)
		place_in_code = FIELD(w, u32, at_instruction);
	else
		place_in_code = FIELD(w, u64, at_instruction) - code;
	if (read_user(task, &line, sizeof(line), code + p->line))
		count_stop(PYTHON_MEMORY);
	/* The two words are kept together or not at all. */
	if (w->slot == SONDE_USER_FRAMES - 1 && !put(w, 0))
		return 1;
	if (!put(w, PYTHON_FRAME | code) ||
	    !put(w, PYTHON_FRAME | (u64)(line & 0x7fffffff) << 32 | (u32)place_in_code))
		return 1;
	if (is_last)
		w->in_python = 0;
	return 0;
}

#endif
