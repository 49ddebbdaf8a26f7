/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Frames of V8 (src/execution/frame-constants.h of V8). All of its code keeps frame pointers, so the
 * walk goes by them; below the frame pointer lie the context and the function, or a number that marks
 * a frame without function. A function (JSFunction) moves with nearly every collection of garbage; what
 * describes it (SharedFunctionInfo) and its Code seldom do, so their addresses are what is kept.
 */
#ifndef SONDE_UNWIND_V8_H
#define SONDE_UNWIND_V8_H

#include "unwind_state.h"

/* Bytes below rbp. */
#define V8_CONTEXT 8
#define V8_FUNCTION 16
#define V8_BYTECODE_OFFSET 40

#define V8_FUNCTION_BYTES 64	      /* of a JSFunction: all fields that are read lie in these */
#define V8_ENTRY_BYTES 32	      /* of a function's code, before it makes its frame */
#define V8_FUNCTION_REGISTER 5	      /* rdi, by DWARF's number: the function at its entry */
#define V8_ADDRESS ((1ULL << 47) - 1) /* the bits of an address of user space */

/* Whether a word is a (strong) tagged pointer to an object of V8's heap. */
static __always_inline bool v8_is_object(u64 word)
{
	return (word & 3) == 1;
}

/* Whether `pc` is in the file that V8 is in: its C++ code, or the builtins that it embeds. */
static __always_inline bool in_v8(const struct unwind_walk *w, u64 pc)
{
	const struct unwind_v8 *v8 = &w->process.v8;

	return w->process.runtime == RUNTIME_V8 &&
	       ((pc >= v8->builtins[0] && pc < v8->builtins[1]) ||
		(pc >= v8->builtins[2] && pc < v8->builtins[3]));
}

/* Puts the two words of a function: 1; 0: it is none; -1: there is no room. `builtin`: the instruction's
 * address where a builtin runs it, else 0. `place`: see abi/unwind.h. */
WALK_PART long v8_put(struct unwind_walk *w, walked_task task, u64 function, u64 place, u64 builtin)
{
	if (!w)
		return 0;

	u64 at = function - 1, shared = 0, code = 0, kind = V8_FRAME;

	if (!v8_is_object(function))
		return 0;
	if (!window_get(&w->frames, at + w->process.v8.code, &code) ||
	    !window_get(&w->frames, at + w->process.v8.shared, &shared)) {
		window_read(&w->frames, task, at, V8_FUNCTION_BYTES);
		if (!window_get(&w->frames, at + w->process.v8.shared, &shared) ||
		    !window_get(&w->frames, at + w->process.v8.code, &code))
			return 0;
	}
	if (!v8_is_object(shared))
		return 0;
	if (builtin) {
		code = builtin;
		kind |= V8_BUILTIN;
	} else {
		code &= ~7ULL;
	}
	place &= 0xffffffff;
	/* The two words are kept together or not at all. */
	if (w->slot == SONDE_USER_FRAMES - 1 && !put(w, 0))
		return -1;
	if (!put(w, kind | place >> 16 << 47 | (shared & V8_ADDRESS & ~7ULL)) ||
	    !put(w, INTERPRETED_FRAME | (place & 0xffff) << 47 | (code & V8_ADDRESS)))
		return -1;
	return 1;
}

/* Puts the frame at rbp; returns as v8_put. `is_builtin`: V8's own code runs it (interpreter, builtins). */
static __always_inline long v8_put_frame(struct unwind_walk *w, walked_task task, u64 look_at,
					 bool is_builtin)
{
	u64 at = w->bp, context = 0, function = 0, place = look_at;

	if (at & 7 || on_stack(w, task, &context, at - V8_CONTEXT) || !v8_is_object(context) ||
	    on_stack(w, task, &function, at - V8_FUNCTION))
		return 0;
	if (is_builtin && (on_stack(w, task, &place, at - V8_BYTECODE_OFFSET) || (u32)place))
		place = 0;
	else if (is_builtin)
		place >>= 32;
	return v8_put(w, task, function, place, is_builtin ? look_at : 0);
}

/*
 * How many words above rsp the return address is, where the innermost function has not yet made its frame or
 * has left it already; -1 where it has its frame. By the code at pc.
 */
WALK_PART long v8_words_to_return(struct unwind_walk *w, walked_task task)
{
	if (!w)
		return -1;

	u32 bytes = 0;

	window_clear(&w->frames, V8_FUNCTION_BYTES);
	if (read_user(task, w->frames.word, V8_ENTRY_BYTES + 4, w->pc))
		return -1;
	for (u32 i = 0; i < V8_ENTRY_BYTES; i++) {
		__builtin_memcpy(&bytes, (u8 *)w->frames.word + i, sizeof(bytes));
		if (bytes == 0xe5894855) /* push rbp; mov rbp, rsp */
			return 0;
		if (i)
			continue;
		if ((u8)bytes == 0xc3 || (u8)bytes == 0xc2) /* ret */
			return 0;
		if ((bytes & 0xffffff) == 0xe58948) /* mov rbp, rsp */
			return 1;
	}
	return -1;
}

/* Puts one frame of code that V8 has compiled and goes to its caller; as unwind_step. */
WALK_PART long v8_step(struct unwind_walk *w, walked_task task)
{
	if (!w)
		return 1;

	u64 look_at = w->pc - (w->is_return ? 1 : 0), saved[2] = {};
	long was_put, words = -1;

	if (w->is_first) {
		words = v8_words_to_return(w, task);
		window_clear(&w->frames, V8_FUNCTION_BYTES);
	}
	/* Its function is in a register until it is in its frame. */
	if (w->is_first && (words >= 0 || w->bp - w->sp < V8_FUNCTION))
		was_put = v8_put(w, task, w->registers[V8_FUNCTION_REGISTER], look_at, 0);
	else
		was_put = v8_put_frame(w, task, look_at, false);
	if (was_put < 0 || (!was_put && !put(w, w->pc)))
		return 1;
	if (words < 0)
		return step_by_frame_pointer(w, task, STOP_NO_RULE);
	if (on_stack(w, task, &saved[1], w->sp + 8 * words) ||
	    (words && on_stack(w, task, &saved[0], w->sp))) {
		w->stop = STOP_MEMORY;
		return 1;
	}
	if (words)
		w->bp = saved[0];
	w->sp += 8 * words + 8;
	w->pc = saved[1];
	w->is_return = 1;
	w->is_first = 0;
	return 0;
}

#endif
