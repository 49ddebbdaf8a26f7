/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Frames of HotSpot's interpreter (JDK 17 and 21, src/hotspot/cpu/x86/frame_x86.hpp). rbp points to
 * the frame. A method with arguments may have moved its caller's stack pointer, which is kept in
 * the frame (sender_sp).
 */
#ifndef SONDE_UNWIND_JAVA_H
#define SONDE_UNWIND_JAVA_H

#include "unwind_state.h"

/* Bytes below rbp; and DWARF's number of the register with the address of the bytecode. */
#define JAVA_SENDER_SP 8
#define JAVA_METHOD 24
#define JAVA_BYTECODE 64
#define BYTECODE_REGISTER 13

WALK_PART long java_step(struct unwind_walk *w, walked_task task)
{
	if (!w)
		return 1;

	u64 method, bytecode, sp, bp, pc, at = w->bp;

	if (at & 7 || at < w->sp || on_stack(w, task, &bytecode, at - JAVA_BYTECODE) ||
	    on_stack(w, task, &method, at - JAVA_METHOD) ||
	    on_stack(w, task, &sp, at - JAVA_SENDER_SP) || on_stack(w, task, &bp, at) ||
	    on_stack(w, task, &pc, at + 8)) {
		w->stop = STOP_MEMORY;
		return 1;
	}
	if (w->is_first) /* the innermost frame: its bytecode is stored only when it calls something */
		bytecode = w->registers[BYTECODE_REGISTER];
	if (sp <= at || !pc) {
		w->stop = STOP_NO_PROGRESS;
		return 1;
	}
	/*
	 * A long stack is stored in pieces of SONDE_USER_FRAMES words. Where one slot is left of a piece, a 0
	 * fills it, so that the two words are in one piece.
	 */
	if (w->slot == SONDE_USER_FRAMES - 1 && !put(w, 0))
		return 1;
	if (!put(w, JAVA_FRAME | (method & ~7ULL)) || !put(w, INTERPRETED_FRAME | bytecode))
		return 1;
	w->pc = pc;
	w->sp = sp;
	w->bp = bp;
	w->is_return = 1;
	w->is_first = 0;
	return 0;
}

#endif
