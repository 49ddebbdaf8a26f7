/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Frames of Ruby and PHP: a chain that begins at the thread's newest one. As with CPython, each
 * evaluation loop on the native stack takes as many of them as it has run, so the frames of C that
 * called it and that it has called lie where they belong. What differs between the two is data
 * (struct unwind_chain).
 */
#ifndef SONDE_UNWIND_CHAIN_H
#define SONDE_UNWIND_CHAIN_H

#include "unwind_state.h"

#define CHAIN_FRAME_BYTES 64		 /* read of a frame, at most */
#define CHAIN_ADDRESS ((1ULL << 47) - 1) /* the bits of an address of user space */

/* From the thread's base (fs) on, in glibc and musl: the pointer to its table of modules (DTV). */
#define TABLE_OF_MODULES 8

/* w->is_rest: frames that no loop has taken are put now; whether the mark before them was put. */
#define REST_UNMARKED 1
#define REST_MARKED 2

/* Sets w->next_frame to the newest frame of the thread; to 0 where it has none that can be reached. */
WALK_PART long chain_enter(struct unwind_walk *w, walked_task task)
{
	if (!w)
		return 0;

	const struct unwind_chain *c = &w->process.chain;
	u64 at = c->root, value = 0;

	w->next_known = 1;
	w->next_frame = 0;
	w->frames_end = ~0ULL;
	window_clear(&w->frames, WINDOW_OF_FRAMES);
	window_clear(&w->values, WINDOW_OF_FRAMES);
	if (c->root_kind == ROOT_OF_THREAD) {
		at += w->thread_base;
	} else if (c->root_kind == ROOT_OF_MODULE) {
		if (read_user(task, &value, 8, w->thread_base + TABLE_OF_MODULES) ||
		    read_user(task, &value, 8, value + c->module * c->module_stride))
			goto none;
		at += value;
	}
	if (read_user(task, &value, 8, at) || !value)
		goto none;
	if (c->newest != ABSENT) {
		u64 found[3] = {0, ~0ULL >> 3, 0};

		if (c->bounded ? read_user(task, found, sizeof(found), value + c->newest - 16) :
				 read_user(task, &found[2], 8, value + c->newest))
			goto none;
		value = found[2];
		w->frames_end = found[0] + 8 * found[1];
	}
	w->next_frame = value;
	return 0;
none:
	count_stop(CHAIN_NO_THREAD);
	return 0;
}

/* Puts the two words of a frame into one piece; 0 where there is no room. */
WALK_PART long chain_put(struct unwind_walk *w, u64 first, u64 second)
{
	if (!w)
		return 0;

	if (w->slot == SONDE_USER_FRAMES - 1 && !put(w, 0))
		return 0;
	return put(w, first) && put(w, INTERPRETED_FRAME | (second & CHAIN_ADDRESS));
}

/* An evaluation loop takes its frames next; where there are none, a mark is put instead. -1: no room. */
static __always_inline long chain_begin(struct unwind_walk *w, walked_task task)
{
	if (!w->next_known)
		chain_enter(w, task);
	if (w->next_frame) {
		w->in_loop = 1;
		w->in_first_loop = w->is_first;
		return 1;
	}
	return chain_put(w, CHAIN_FRAME, w->pc) ? 1 : -1;
}

/* A word of memory, read with what is around it; false where it cannot be read. */
static __always_inline bool chain_word(struct unwind_window *v, walked_task task, u64 at,
				       u64 *value)
{
	if (window_get(v, at, value))
		return true;
	if (at & 7)
		return false;
	window_below(v, task, at, 8);
	return window_get(v, at, value);
}

/* The word of a frame at an offset. */
static __always_inline u64 chain_field(const struct unwind_walk *w, u64 frame, u16 offset)
{
	u64 word = 0;

	window_get(&w->frames, frame + (offset & (CHAIN_FRAME_BYTES - 8)), &word);
	return word;
}

/*
 * Reads the frame into w->frames, unless it is there; false where it cannot be read. With it what follows,
 * where frames are an array, else (linked by `previous`) what lies before it.
 */
static __always_inline bool chain_read(struct unwind_walk *w, walked_task task, u64 frame)
{
	const struct unwind_chain *c = &w->process.chain;
	u64 inside = frame - w->frames.from, room = USER_PAGE - (frame & (USER_PAGE - 1));
	u32 bytes = w->frames.words * 8;
	u64 size = c->frame_bytes;

	if (frame & 7 || size > CHAIN_FRAME_BYTES)
		return false;
	if (inside < bytes && bytes - inside >= size)
		return true;
	if (c->previous != ABSENT) {
		window_below(&w->frames, task, frame, size);
		return w->frames.words != 0;
	}
	if (room < size) /* it lies across the end of a page */
		room = size;
	window_read(&w->frames, task, frame, room < WINDOW_OF_FRAMES ? room : WINDOW_OF_FRAMES);
	return w->frames.words != 0;
}

/* Puts one frame; after the last one of an evaluation loop native frames follow. */
WALK_PART long chain_step(struct unwind_walk *w, walked_task task)
{
	if (!w)
		return 1;

	const struct unwind_chain *c = &w->process.chain;
	u64 frame = w->next_frame, function, place, flags, at;
	u64 native = 0;
	u16 reg = c->place_register;

	if (!frame || frame >= w->frames_end)
		goto ended;
	if (!chain_read(w, task, frame))
		goto unreadable;
	function = chain_field(w, frame, c->function);
	place = chain_field(w, frame, c->place);
	at = flags = chain_field(w, frame, c->flags);
	if (c->flags_are_behind && !chain_word(&w->values, task, at, &flags))
		goto unreadable;
	if (!function && c->native != ABSENT) {
		if (!chain_word(&w->values, task, at - c->native, &function))
			goto unreadable;
		native = CHAIN_NATIVE;
		place = 0;
	}
	if (c->previous != ABSENT)
		w->next_frame = chain_field(w, frame, c->previous);
	else
		w->next_frame = frame + c->frame_bytes;
	if (flags >> (c->last & 63) & 1 && !w->is_rest)
		w->in_loop = 0;
	if (w->in_first_loop) {
		w->in_first_loop = 0;
		if (reg < 16)
			place = w->registers[reg & 15];
	}
	if (c->dummy && (flags >> 16 & 0x7fff) == c->dummy)
		return w->is_rest != 0;
	if (!function || function & 7 || (c->native != ABSENT && !native && !place))
		return 0; /* a frame of the interpreter itself, or of a block in C */
	if (w->is_rest == REST_UNMARKED) {
		w->is_rest = REST_MARKED;
		if (!chain_put(w, CHAIN_FRAME, 0))
			return 1;
	}
	return !chain_put(w, CHAIN_FRAME | native | (function & CHAIN_ADDRESS), place);
unreadable:
	count_stop(CHAIN_MEMORY);
ended:
	w->next_frame = 0;
	w->in_loop = 0;
	return w->is_rest != 0;
}

/*
 * Whether frames remain that no loop has taken, once a walk has reached the thread's entry. The newest loop
 * was just being entered, so each loop took the frames of the one inside it; user space shifts them.
 */
static __always_inline bool chain_has_rest(struct unwind_walk *w)
{
	if (w->process.runtime != RUNTIME_CHAIN || w->stop != STOP_ENTRY || w->is_rest ||
	    !w->next_frame)
		return false;
	w->is_rest = REST_UNMARKED;
	w->in_loop = 1;
	return true;
}

#endif
