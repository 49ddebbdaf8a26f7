/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * CPython's own frames (3.10 to 3.14): the thread's newest one is found through its thread state, and
 * each evaluation loop on the native stack takes as many of them as it has run.
 */
#ifndef SONDE_UNWIND_PYTHON_H
#define SONDE_UNWIND_PYTHON_H

#include "unwind_state.h"

/* Bytes of code at the start of an evaluation loop of 3.11 or 3.12: there its frame may not be known yet. */
#define EVAL_ENTRY_BYTES 192

/* Whether `pc` is in the loop of CPython, Ruby or PHP: their structs have `eval` at the same offset. */
static __always_inline bool in_evaluation(const struct unwind_walk *w, u64 pc)
{
	const struct unwind_python *p = &w->process.python;
	return (w->process.runtime == RUNTIME_PYTHON || w->process.runtime == RUNTIME_CHAIN) &&
	       ((pc >= p->eval[0] && pc < p->eval[1]) || (pc >= p->eval[2] && pc < p->eval[3]));
}

/* Sets w->next_frame to the thread's newest Python frame, the first time; false where there is none (left). */
WALK_PART long python_enter(struct unwind_walk *w, walked_task task)
{
	if (!w)
		return 0;

	const struct unwind_python *p = &w->process.python;
	u64 values = w->thread_base, thread = 0, frame = 0;
	u32 key[2];

	if (w->next_known)
		return w->next_frame != 0;
	w->next_known = 1;
	w->next_frame = 0;
	/* Frames of 3.10 are objects anywhere in the heap: what lies around one is no frame. */
	window_clear(&w->frames, p->instruction_is_index ? PYTHON_FRAME_BYTES : WINDOW_OF_FRAMES);
	__builtin_memset(w->codes, 0, sizeof(w->codes));
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
	w->next_frame = frame;
	if (frame)
		return true;
none:
	count_stop(PYTHON_NO_THREAD);
	return false;
}

/*
 * An evaluation loop of 3.11 or 3.12 that is just being entered: it links its record (_PyCFrame, w->entering)
 * to the thread before it fills it in. So the newest frame is that of the record before.
 */
static __always_inline void python_of_caller(struct unwind_walk *w, walked_task task)
{
	u16 at = w->process.python.frame_of_cframe;
	u64 caller, frame;

	if (!read_user(task, &caller, 8, w->entering + at + 8) &&
	    !read_user(task, &frame, 8, caller + at)) {
		w->next_frame = frame;
		w->in_loop = 0; /* it has none yet */
	}
}

/* What the frame has at an offset, in the lowest bits; above them are bits of other fields. */
static __always_inline u64 field(const struct unwind_walk *w, u64 frame, u16 offset)
{
	u64 word = 0;

	if (offset > PYTHON_FRAME_BYTES - 8)
		offset = 0;
	window_get(&w->frames, frame + (offset & ~7), &word);
	return word >> 8 * (offset & 7);
}

/* Reads a stretch that ends with the `size` bytes at `at`: older frames lie below. */
WALK_PART long window_below(struct unwind_window *v, walked_task task, u64 at, u32 size)
{
	if (!v)
		return 0;

	u64 page = at & -(u64)USER_PAGE, end = at + size, from = end - v->next_bytes;

	if (from < page || from > at)
		from = page;
	if (end - from > sizeof(v->word))
		from = end - sizeof(v->word);
	window_read(v, task, from, end - from);
	if (!v->words)
		window_read(v, task, at, size);
	return 0;
}

/* Reads the frame into w->frames, unless it is there; false where it cannot be read. */
static __always_inline bool read_frame(struct unwind_walk *w, walked_task task, u64 frame)
{
	u64 inside = frame - w->frames.from;
	u32 bytes = w->frames.words * 8;

	if (frame & 7)
		return false;
	if (inside < bytes && bytes - inside >= PYTHON_FRAME_BYTES)
		return true;
	window_below(&w->frames, task, frame, PYTHON_FRAME_BYTES);
	return w->frames.words != 0;
}

/* The first line of a code object; 0 where it cannot be read. */
static __always_inline u32 first_line(struct unwind_walk *w, walked_task task, u64 code)
{
	u32 slot = code * 0x9e3779b97f4a7c15ULL >> 60;

	OPAQUE(slot);
	slot &= PYTHON_CODES - 1;
	if (!code || w->codes[slot] != code) { /* 0: an empty slot */
		u32 line = 0;

		if (read_user(task, &line, sizeof(line), code + w->process.python.line)) {
			count_stop(PYTHON_MEMORY);
			return 0;
		}
		w->lines[slot] = line;
		w->codes[slot] = code;
	}
	return w->lines[slot];
}

/* Puts one Python frame; after the last one of an evaluation loop native frames follow. */
WALK_PART long python_step(struct unwind_walk *w, walked_task task)
{
	if (!w)
		return 1;

	const struct unwind_python *p = &w->process.python;
	u16 at_previous = p->previous, at_code = p->code, at_instruction = p->instruction;
	u16 at_owner = p->owner, at_entry = p->entry;
	u64 code, place_in_code, frame = w->next_frame;
	bool is_last = false;
	u32 line;

	if (!frame) {
		count_stop(PYTHON_NO_FRAME);
		w->in_loop = 0;
		return 0;
	}
	if (!read_frame(w, task, frame)) {
		count_stop(PYTHON_MEMORY);
		w->next_frame = 0;
		w->in_loop = 0;
		return 0;
	}
	w->next_frame = field(w, frame, at_previous);
	if (at_owner != ABSENT) {
		if ((u8)field(w, frame, at_owner) >= p->owner_entry) {
			w->in_loop = 0;
			return 0;
		}
	} else {
		is_last = at_entry == ABSENT || (u8)field(w, frame, at_entry);
	}
	code = field(w, frame, at_code) & ~7ULL;
	if (p->instruction_is_index)
		place_in_code = (u32)field(w, frame, at_instruction);
	else
		place_in_code = field(w, frame, at_instruction) - code;
	line = first_line(w, task, code);
	/* The two words are kept together or not at all. */
	if (w->slot == SONDE_USER_FRAMES - 1 && !put(w, 0))
		return 1;
	if (!put(w, INTERPRETED_FRAME | code) ||
	    !put(w, INTERPRETED_FRAME | (u64)(line & 0x7fffffff) << 32 | (u32)place_in_code))
		return 1;
	if (is_last)
		w->in_loop = 0;
	return 0;
}

#endif
