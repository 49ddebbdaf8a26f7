/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Looking up mappings of a process and rules of a file. */
#ifndef SONDE_UNWIND_TABLES_H
#define SONDE_UNWIND_TABLES_H

#include "unwind_state.h"

/* The chunk that a reference leads into. */
static __always_inline struct unwind_chunk *chunk_of(u32 reference)
{
	const u32 first = 0;
	u32 number = reference >> 16;
	void *map = bpf_map_lookup_elem(&unwind_chunks, &number);

	return map ? bpf_map_lookup_elem(map, &first) : NULL;
}

/* The `words` 32-bit words of a chunk that a reference names; NULL where the chunk ends before. */
static __always_inline void *place(struct unwind_chunk *chunk, u32 reference, u32 words)
{
	u64 at = reference & 0xffff;

	/* clang would make "at == 65535" of this, from which verifiers before 6.8 learn no bound. */
	OPAQUE(at);
	if (at > UNWIND_CHUNK_WORDS - words)
		return NULL;
	OPAQUE(at); /* the pointer is made after the check, not before */
	return &chunk->words[at];
}

#define RANGE_WORDS (sizeof(struct unwind_range) / 4)

/* Sets w->range to the mapping that holds `pc`; false where there is none. */
WALK_PART long find_range(struct unwind_walk *w, u64 pc)
{
	if (!w)
		return 0;

	u32 first = w->process.ranges;
	struct unwind_chunk *chunk;
	struct unwind_range *r;

	if (w->has_range && pc >= w->range.start && pc < w->range.end)
		return true;
	chunk = chunk_of(first);
	if (!chunk)
		return false;
	w->low = 0;
	w->high = w->process.range_count;
	for (int i = 0; i < 13; i++) { /* a binary search: 2^12 = UNWIND_MAX_RANGES */
		u32 middle = (w->low + w->high) >> 1;

		if (w->low >= w->high)
			break;
		r = place(chunk, first + middle * RANGE_WORDS, RANGE_WORDS);
		if (!r)
			return false;
		if (r->start <= pc)
			w->low = middle + 1;
		else
			w->high = middle;
	}
	if (!w->low)
		return false;
	r = place(chunk, first + (w->low - 1) * RANGE_WORDS, RANGE_WORDS);
	if (!r || pc < r->start || pc >= r->end)
		return false;
	w->range = *r;
	w->has_range = 1;
	return true;
}

/* Finds the rule for the code at `address` (as linked) of the mapping found last; false where there is none, or
 * where its page is not loaded (which is asked for). */
WALK_PART long find_rule(struct unwind_walk *w, u64 address, struct unwind_rule *rule)
{
	if (!w || !rule)
		return 0;

	u64 page = (address >> 16) - w->range.first_page;
	u32 inner = address & 0xffff, rows;
	struct unwind_chunk *chunk;
	struct unwind_rule *found;
	u32 *entry, *row;
	u64 found_rows;

	if (page >= w->range.page_count)
		return false;
	rows = w->range.pages + 2 * (u32)page;
	chunk = chunk_of(rows);
	entry = chunk ? place(chunk, rows, 2) : NULL;
	if (!entry)
		return false;
	found_rows = *(u64 *)entry; /* both words at once, as they are written */
	w->low = 0;
	w->high = found_rows >> 32;
	if (!w->high) {
		want_page(rows);
		return false;
	}
	rows = (u32)found_rows;
	chunk = chunk_of(rows);
	if (!chunk)
		return false;
	for (int i = 0; i < 17; i++) { /* a page has no more than 2^16 rows */
		u32 middle = (w->low + w->high) >> 1;

		if (w->low >= w->high)
			break;
		row = place(chunk, rows + middle, 1);
		if (!row)
			return false;
		if (*row >> 16 <= inner)
			w->low = middle + 1;
		else
			w->high = middle;
	}
	row = w->low ? place(chunk, rows + w->low - 1, 1) : NULL;
	if (!row)
		return false;
	rows = w->range.rules + 4 * (*row & 0xffff);
	chunk = chunk_of(rows);
	found = chunk ? place(chunk, rows, 4) : NULL;
	if (!found)
		return false;
	*rule = *found;
	return true;
}

static __always_inline u64 memo_key(const struct unwind_walk *w, u64 address)
{
	return (address ^ w->process.epoch) * 0x9e3779b97f4a7c15ULL;
}

static __always_inline u64 memo_check(u64 key, const u64 *rule)
{
	return key ^ rule[0] ^ (rule[1] << 32 | rule[1] >> 32);
}

/* The rule for code that was looked up lately; false where it has to be looked up (again). */
static __always_inline bool recall(struct unwind_memo *memo, u64 key, struct unwind_rule *rule)
{
	struct unwind_recalled *at = &memo->at[key >> (64 - UNWIND_MEMO_BITS)];
	u64 words[2] = {at->rule[0], at->rule[1]};

	if (at->check != memo_check(key, words))
		return false;
	__builtin_memcpy(rule, words, sizeof(*rule));
	return true;
}

static __always_inline void remember(struct unwind_memo *memo, u64 key,
				     const struct unwind_rule *rule)
{
	struct unwind_recalled *at = &memo->at[key >> (64 - UNWIND_MEMO_BITS)];
	u64 words[2];

	__builtin_memcpy(words, rule, sizeof(words));
	at->rule[0] = words[0];
	at->rule[1] = words[1];
	at->check = memo_check(key, words);
}

#endif
