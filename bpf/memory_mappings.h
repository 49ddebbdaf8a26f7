/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Rows of host memory, and the mappings that are followed so that what is unmapped of them is reported
 * with the stack that mapped it.
 */
#ifndef SONDE_MEMORY_MAPPINGS_H
#define SONDE_MEMORY_MAPPINGS_H

#include "row_share.h"

#define PIECES 16 /* followed mappings looked at in one unmapped range; others stay followed */
#define MOST_MAPPINGS 16384
#define MAPPINGS_OF_ONE_PARTY                                                                      \
	16 /* of the last quarter: as long as fewer than this part of all are its own */

SWAPPED_ROWS(memory, struct memory_key, struct memory_value, 8192)
SPARE_ROWS(memory, struct memory_key, struct memory_value, 2048)

/* Mappings that are followed, by where they begin; and where they begin, by where they end. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MOST_MAPPINGS);
	__type(key, struct memory_place);
	__type(value, struct memory_mapping);
} mappings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MOST_MAPPINGS);
	__type(key, struct memory_place);
	__type(value, u64);
} mapping_ends SEC(".maps");

/* How many are followed: of all, and of each party (party.h) but the machine's root. User space, which stops
 * following others, sets both whenever it has compared all. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
} mappings_followed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 2048);
	__type(key, u64);
	__type(value, u64);
} mapping_parties SEC(".maps");

/* The row of `key`, made where `party` may have one; NULL where it may not. Not inlined, as what follows: a program
 * adds in several places. */
static __noinline struct memory_value *row_for(const struct memory_key *key, u64 party)
{
	const struct memory_value zero = {};

	return fair_row(&memory, key, &zero, party, key->start_ns);
}

static __noinline struct memory_value *coarser_row(const struct memory_key *key, u64 party)
{
	/* A new row and the key of the rest in one: there is no room for both on the stack. */
	const u64 zero[sizeof(struct memory_key) / sizeof(u64)] = {};
	struct memory_key coarser = *key;

	_Static_assert(sizeof(zero) >= sizeof(struct memory_value), "a new row is as long");
	coarser.tid = 0;
	coarser.stack_id = 0;
	return fair_spare_row(&memory_spare, &coarser, zero, zero, party, key->start_ns);
}

/* Adds to the row of `key`, of a process of `party`, else to a coarser one; where there is neither, that is a
 * loss. */
static __always_inline void add(const struct memory_key *key, u64 party, u64 count, u64 bytes,
				u64 weight, u64 weight_bytes)
{
	struct memory_value *row = row_for(key, party);

	if (!row) {
		row = coarser_row(key, party);
		if (!row)
			return;
		ADD_TO(row->count, count);
		ADD_TO(row->bytes, bytes);
		ADD_TO(row->weight_count, weight);
		ADD_TO(row->weight_bytes, weight_bytes);
		return;
	}
	row->count += count;
	row->bytes += bytes;
	row->weight_count += weight;
	row->weight_bytes += weight_bytes;
}

/* Whether another mapping of `party` is followed. Anybody can map what takes no memory: so three quarters
 * are first come, first served, and of the last one a party that is not the machine's root has its share.
 * What is not followed gets no stack either: else all that it maps and unmaps would seem to be held. */
static __always_inline bool may_follow(u64 party)
{
	const u32 first = 0;
	const u64 *all = bpf_map_lookup_elem(&mappings_followed, &first), *of_party;

	if (!all || *all >= MOST_MAPPINGS)
		return false;
	if (!party || *all < MOST_MAPPINGS / 4 * 3)
		return true;
	of_party = bpf_map_lookup_elem(&mapping_parties, &party);
	return !of_party || *of_party < MOST_MAPPINGS / MAPPINGS_OF_ONE_PARTY;
}

/* One mapping of `party` more or fewer (-1) is followed. */
static __always_inline void count_followed(u64 party, s64 more)
{
	const u32 first = 0;
	const u64 one = 1;
	u64 *count = bpf_map_lookup_elem(&mappings_followed, &first);

	if (count && (more > 0 || *count))
		ADD_TO(*count, more);
	if (!party)
		return;
	count = bpf_map_lookup_elem(&mapping_parties, &party);
	if (count && (more > 0 || *count))
		ADD_TO(*count, more);
	else if (!count && more > 0)
		bpf_map_update_elem(&mapping_parties, &party, &one, BPF_NOEXIST);
}

/* Forgets that the mapping that begins at `from` ends at `to`; where another one ends there, that stays. */
static __always_inline void forget_end(u32 tgid, u64 from, u64 to)
{
	struct memory_place end = {.address = to, .tgid = tgid};
	u64 *start = bpf_map_lookup_elem(&mapping_ends, &end);

	if (start && *start == from)
		bpf_map_delete_elem(&mapping_ends, &end);
}

/* Follows a mapping, in place of one that begins at the same address: of those that a range has, only PIECES
 * leave. */
static __always_inline void follow(u32 tgid, u64 from, const struct memory_mapping *m)
{
	struct memory_place begin = {.address = from, .tgid = tgid};
	struct memory_place end = {.address = from + m->bytes, .tgid = tgid};
	struct memory_mapping *known = bpf_map_lookup_elem(&mappings, &begin);

	if (known)
		forget_end(tgid, from, from + known->bytes);
	if (bpf_map_update_elem(&mappings, &begin, m, BPF_ANY)) {
		count_loss(LOSS_MAPPINGS);
		return;
	}
	if (!known)
		count_followed(m->party, 1);
	if (bpf_map_update_elem(&mapping_ends, &end, &from, BPF_ANY))
		count_loss(LOSS_MAPPINGS);
}

static __always_inline void forget(u32 tgid, u64 from, const struct memory_mapping *m)
{
	struct memory_place begin = {.address = from, .tgid = tgid};

	if (!bpf_map_delete_elem(&mappings, &begin))
		count_followed(m->party, -1);
	forget_end(tgid, from, from + m->bytes);
}

/* Counts bytes of a followed mapping that are unmapped, with the stack that mapped it. */
static __always_inline void given_back(u32 tgid, const struct memory_mapping *m, u64 bytes)
{
	struct memory_key key = {
		.tgid = tgid,
		.tid = m->tid,
		.start_ns = m->start_ns,
		.stack_id = m->stack_id,
		.kind = m->kind,
		.is_freed = 1,
	};
	u32 whole = bytes == m->bytes && !m->is_part;

	add(&key, m->party, whole, bytes, whole * m->weight, bytes * m->weight);
}

/* A range that is unmapped: what of it is still to be looked at. */
struct leaving {
	u64 from;
	u64 to;
	u64 start_ns; /* of the process */
	u64 followed; /* bytes that were followed, so far */
	u32 tgid;
	u32 kind; /* of the last mapping found in it */
};

/* The followed mapping of `tgid` that ends at `to`, and in `from` where it begins; NULL where none does. An
 * entry of mapping_ends can outlive its mapping, where two threads map at the same address at once, until user
 * space compares. */
static __always_inline struct memory_mapping *ending_at(u32 tgid, u64 to, u64 *from)
{
	struct memory_place end = {.address = to, .tgid = tgid}, begin = {.tgid = tgid};
	u64 *start = bpf_map_lookup_elem(&mapping_ends, &end);
	struct memory_mapping *known;

	if (!start)
		return NULL;
	begin.address = *start;
	known = bpf_map_lookup_elem(&mappings, &begin);
	if (known && begin.address + known->bytes == to) {
		*from = begin.address;
		return known;
	}
	bpf_map_delete_elem(&mapping_ends, &end);
	return NULL;
}

/* One mapping that lies in the range: at its end, else at its beginning. Returns 1 where none is known. */
static long leave_piece(u32 i, void *arg)
{
	struct leaving *l = arg;
	struct memory_place begin = {.address = l->from, .tgid = l->tgid};
	struct memory_mapping *known, m;
	u64 from = l->from, to, gone, rest = 0;

	if (l->from >= l->to)
		return 1;
	known = ending_at(l->tgid, l->to, &from);
	if (!known)
		known = bpf_map_lookup_elem(&mappings, &begin);
	if (!known || known->start_ns != l->start_ns)
		return 1;
	m = *known;
	to = from + m.bytes;
	forget(l->tgid, from, &m);
	if (from < l->from) { /* its tail */
		gone = l->to - l->from;
		rest = from;
		l->to = l->from;
	} else if (to > l->to) { /* its head */
		gone = l->to - from;
		rest = l->to;
		l->to = l->from;
	} else {
		gone = m.bytes;
		if (to == l->to)
			l->to = from;
		else
			l->from = to;
	}
	given_back(l->tgid, &m, gone);
	if (gone < m.bytes) {
		m.bytes -= gone;
		follow(l->tgid, rest, &m);
	}
	l->followed += gone;
	l->kind = m.kind;
	return 0;
}

/* Stops following what of a range is followed, and counts it as unmapped. */
static __always_inline struct leaving leave(struct task_struct *task, u64 start_ns, u64 from,
					    u64 bytes)
{
	struct leaving l = {
		.from = from,
		.to = from + bytes,
		.start_ns = start_ns,
		.tgid = task->tgid,
	};

	if (has_loop())
		bpf_loop(PIECES, leave_piece, &l, 0);
	else
		leave_piece(0, &l);
	return l;
}

#endif
