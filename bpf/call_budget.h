/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Whose calls at a site cost too much. Where a site comes near its budget, user space
 * (src/sonde/collect/probe_budget.py) has its hits counted by party, and names the parties whose calls are
 * not counted for a while (paused).
 * Include share.h and MAX_SITES before it.
 */
#ifndef SONDE_CALL_BUDGET_H
#define SONDE_CALL_BUDGET_H

struct site_of_party {
	u64 party;
	u32 site;
	u32 unused;
};

struct hits_of_party {
	u64 hits;
	u32 tgid; /* of the last one: by it user space names a container */
	u32 unused;
};

/* 1: hits of this site are counted by party. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SITES);
	__type(key, u32);
	__type(value, u32);
} near_budget SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct site_of_party);
	__type(value, struct hits_of_party);
} party_hits SEC(".maps");

/* Parties whose calls are not counted, with how many calls that were. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct site_of_party);
	__type(value, u64);
} paused_parties SEC(".maps");

/* Counts a hit by its party where user space asked for that. Returns the counter of calls that are not
 * counted, where the party is paused, else NULL. */
static __noinline u64 *hit_of_party(struct task_struct *task, u32 site)
{
	const u32 *near = bpf_map_lookup_elem(&near_budget, &site);
	struct hits_of_party first = {.hits = 1}, *hits;
	struct site_of_party key = {.site = site};

	if (!near || !*near)
		return NULL;
	key.party = party_of(task);
	hits = bpf_map_lookup_elem(&party_hits, &key);
	if (hits) {
		__sync_fetch_and_add(&hits->hits, 1);
		hits->tgid = task->tgid;
	} else {
		first.tgid = task->tgid;
		bpf_map_update_elem(&party_hits, &key, &first, BPF_ANY);
	}
	return bpf_map_lookup_elem(&paused_parties, &key);
}

#endif
