/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Stretches of user memory, each read at once. A read costs nearly the same for any number of bytes, and
 * frames lie close together: so a walk reads a stretch and finds the next frames in it. A stretch never
 * leaves the page of what is asked for: it can be read wherever that can.
 */
#ifndef SONDE_UNWIND_WINDOW_H
#define SONDE_UNWIND_WINDOW_H

#define WINDOW_WORDS 128     /* a power of 2 */
#define WINDOW_OF_STACK 256  /* bytes at first: most stacks are short; twice as many each time */
#define WINDOW_OF_FRAMES 512 /* bytes of Python's frames: four or five of them */
#define SAVED_BYTES 48	     /* registers below a return address */
#define USER_PAGE 4096

/* `words` of a process's memory, from `from` on; `next_bytes`: how long the next stretch is at most. */
struct unwind_window {
	u64 from;
	u32 words;
	u32 next_bytes;
	u64 word[WINDOW_WORDS];
};

/* Makes it empty. `bytes`: next_bytes. */
static __always_inline void window_clear(struct unwind_window *v, u32 bytes)
{
	v->words = 0;
	v->next_bytes = bytes;
}

/* The word at an address; false where the window does not have it. */
static __always_inline bool window_get(const struct unwind_window *v, u64 at, u64 *value)
{
	u64 index = (at - v->from) >> 3;

	if (at & 7 || index >= v->words)
		return false;
	OPAQUE(index);
	*value = v->word[index & (WINDOW_WORDS - 1)];
	return true;
}

/* Reads `bytes` at an address that is a multiple of 8; none where they cannot be read. */
static __always_inline void window_read(struct unwind_window *v, walked_task task, u64 from,
					u64 bytes)
{
	u32 size = bytes < sizeof(v->word) ? bytes : sizeof(v->word);

	OPAQUE(size);
	if (size > sizeof(v->word))
		size = sizeof(v->word);
	v->from = from;
	v->words = read_user(task, v->word, size, from) ? 0 : size >> 3;
}

/* Reads a stretch of the stack that has `at`, and what its frame may have saved below it. */
WALK_PART long window_on_stack(struct unwind_window *v, walked_task task, u64 sp, u64 at)
{
	if (!v)
		return 0;

	u64 page = at & -(u64)USER_PAGE, from = at - SAVED_BYTES, bytes;

	if (from < sp && sp <= at)
		from = (sp + 7) & ~7ULL;
	if (from < page)
		from = page;
	bytes = page + USER_PAGE - from;
	if (bytes > v->next_bytes)
		bytes = v->next_bytes;
	if (v->next_bytes < sizeof(v->word))
		v->next_bytes *= 2;
	window_read(v, task, from, bytes);
	return 0;
}

/* Reads a word of the stack. Not 0: it cannot be read. */
static __always_inline long read_stack(struct unwind_window *v, walked_task task, u64 sp, u64 *to,
				       u64 at)
{
	if (window_get(v, at, to))
		return 0;
	if (!(at & 7)) {
		window_on_stack(v, task, sp, at);
		if (window_get(v, at, to))
			return 0;
	}
	return read_user(task, to, 8, at);
}

#endif
