/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Of how many threads, or sockets, one object keeps a storage (TASK_STORAGE, SK_STORAGE): that is memory
 * of the recorder, and anybody can start threads and open sockets. Three quarters are first come, first
 * served; of the last one a party (party.h) makes new storages only as long as it has less than its
 * share. The machine's root has as many again. Include host_types.h before it.
 *
 * The kernel frees a storage with its thread or socket, which no program sees. So they are counted
 * again by each recount, an iterator that passes all of them; a storage holds its party for it. Until a
 * recount has come to its end, the numbers of the one before count, with all that was made since: who
 * makes many and ends them at once has as many until then.
 */
#ifndef SONDE_STORAGE_SHARE_H
#define SONDE_STORAGE_SHARE_H

#include "party.h"

#define STORAGES_OF_ONE_PARTY                                                                      \
	16 /* of the last quarter: as long as it has less than this part of all */

const volatile u64 most_storages = 32768;

/* Storages of a party, or of all, by the recount of an even and of an odd number. */
struct storage_count {
	u64 recount[2];
	u64 storages[2];
};

struct storage_totals {
	u64 done;    /* number of the last recount that came to its end */
	u64 running; /* of the one that goes on, or was given up; `done`: none */
	struct storage_count root;
	struct storage_count others;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct storage_totals);
} storage_totals SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 2048);
	__type(key, u64);
	__type(value, struct storage_count);
} storage_parties SEC(".maps");

static __always_inline struct storage_totals *totals_of_storages(void)
{
	const u32 first = 0;

	return bpf_map_lookup_elem(&storage_totals, &first);
}

/* Number of the recount that goes on, or of the last one. */
static __always_inline u64 running_recount(void)
{
	const struct storage_totals *t = totals_of_storages();

	return t ? t->running : 0;
}

static __always_inline struct storage_count *storages_of(u64 party)
{
	const struct storage_count none = {};
	struct storage_count *it = bpf_map_lookup_elem(&storage_parties, &party);

	if (it)
		return it;
	bpf_map_update_elem(&storage_parties, &party, &none, BPF_NOEXIST);
	return bpf_map_lookup_elem(&storage_parties, &party);
}

static __always_inline u64 storages_by(const struct storage_count *it, u64 recount)
{
	if (recount & 1)
		return it->recount[1] == recount ? it->storages[1] : 0;
	return it->recount[0] == recount ? it->storages[0] : 0;
}

#define COUNT_STORAGE_ON(it, side, number)                                                         \
	do {                                                                                       \
		if ((it)->recount[side] != (number)) {                                             \
			(it)->storages[side] = 0;                                                  \
			(it)->recount[side] = (number);                                            \
		}                                                                                  \
		__sync_fetch_and_add(&(it)->storages[side], 1);                                    \
	} while (0)

static __always_inline void count_storage_in(struct storage_count *it, u64 recount)
{
	if (recount & 1)
		COUNT_STORAGE_ON(it, 1, recount);
	else
		COUNT_STORAGE_ON(it, 0, recount);
}

/* Counts one more storage of a party by a recount. */
static __always_inline void count_storage_by(struct storage_totals *t, u64 party, u64 recount)
{
	struct storage_count *of_party;

	count_storage_in(party ? &t->others : &t->root, recount);
	of_party = party ? storages_of(party) : NULL;
	if (of_party)
		count_storage_in(of_party, recount);
}

/* Whether `party` may have another storage made. Several CPUs at once make a few more than there may be. */
static __always_inline bool may_have_storage(u64 party)
{
	struct storage_totals *t = totals_of_storages();
	struct storage_count *of_party;
	u64 all;

	if (!t)
		return false;
	all = storages_by(party ? &t->others : &t->root, t->done);
	if (all < most_storages && (!party || all < most_storages / 4 * 3))
		return true;
	of_party = party && all < most_storages ? storages_of(party) : NULL;
	return of_party && storages_by(of_party, t->done) < most_storages / STORAGES_OF_ONE_PARTY;
}

/* A storage of `party` was made. */
static __always_inline void count_storage(u64 party)
{
	struct storage_totals *t = totals_of_storages();

	if (!t)
		return;
	count_storage_by(t, party, t->done);
	if (t->running != t->done)
		count_storage_by(t, party, t->running);
}

/*
 * An iterator passes an object; `storage` is NULL where it has none, `at_end` at its last call, which is for
 * no object.
 */
#define RECOUNT(ctx, storage, at_end)                                                              \
	do {                                                                                       \
		struct storage_totals *t_ = totals_of_storages();                                  \
		if (t_ && !(ctx)->meta->seq_num) /* one given up leaves its side */                \
			t_->running += t_->running == t_->done ? 1 : 2;                            \
		if (t_ && (at_end))                                                                \
			t_->done = t_->running;                                                    \
		else if (t_ && (storage) && t_->running != t_->done)                               \
			count_storage_by(t_, (storage)->party, t_->running);                       \
	} while (0)

/* The storage of a task, made where `party` may have one; NULL where it may not, or there is no memory. */
#define MADE_TASK_STORAGE(map, task)                                                               \
	({                                                                                         \
		u64 party_ = party_of(task);                                                       \
		typeof(*(map).value) *made_ = NULL;                                                \
		if (may_have_storage(party_))                                                      \
			made_ = bpf_task_storage_get(&(map), task, 0,                              \
						     BPF_LOCAL_STORAGE_GET_F_CREATE);              \
		if (made_) {                                                                       \
			made_->party = party_;                                                     \
			count_storage(party_);                                                     \
		}                                                                                  \
		made_;                                                                             \
	})

/* The storage of a task, and where there is none yet a new one. */
#define TASK_STORAGE(map, task)                                                                    \
	({                                                                                         \
		typeof(*(map).value) *it_ = bpf_task_storage_get(&(map), task, 0, 0);              \
		it_ ?: MADE_TASK_STORAGE(map, task);                                               \
	})

#endif
