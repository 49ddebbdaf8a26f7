/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What one party (party.h) may take of a map or ring that all share, in about a second. The machine's own
 * root is under no limit. SHARES: the map's name, where objects share one.
 */
#ifndef SONDE_SHARE_H
#define SONDE_SHARE_H

#ifndef SHARES
#define SHARES shares
#endif
#define SHARE_WINDOW_SHIFT 30 /* 1.07 s */

struct share_key {
	u64 party;
	u64 what; /* number of what is shared, as the caller chose it */
};

struct share {
	u64 window; /* time >> SHARE_WINDOW_SHIFT */
	u64 taken;  /* in that window */
};

#define SHARE_MAP(name)                                                                            \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_LRU_HASH);                                               \
		__uint(max_entries, 2048);                                                         \
		__type(key, struct share_key);                                                     \
		__type(value, struct share);                                                       \
	} name SEC(".maps")

SHARE_MAP(SHARES);

/* Whether `party` took less than `most` of `what` in this window, by a SHARE_MAP; counts one more. Party 0 has
 * no limit. */
static __always_inline bool within_share_by(void *shares_of_all, u64 party, u64 what, u64 most)
{
	const struct share_key key = {.party = party, .what = what};
	u64 window = bpf_ktime_get_ns() >> SHARE_WINDOW_SHIFT;
	const struct share first = {.window = window, .taken = 1};
	struct share *it;

	if (!party)
		return true;
	it = bpf_map_lookup_elem(shares_of_all, &key);
	if (!it) {
		bpf_map_update_elem(shares_of_all, &key, &first, BPF_ANY);
		return true;
	}
	if (it->window != window) { /* two CPUs here at once let in a few more than the share */
		it->taken = 0;
		it->window = window;
	}
	return __sync_fetch_and_add(&it->taken, 1) < most;
}

/* The same by the map that this object has for all it divides. */
static __always_inline bool within_share(u64 party, u64 what, u64 most)
{
	return within_share_by(&SHARES, party, what, most);
}

/* The same for a ring buffer, of which half is first come, first served: shares count beyond that.
 * Include party.h before it. */
#define WITHIN_SHARE_OF_RING(ring, task, what, most)                                               \
	(within_share(party_of(task), (what), (most)) ||                                           \
	 bpf_ringbuf_query(&(ring), BPF_RB_AVAIL_DATA) <                                           \
		 bpf_ringbuf_query(&(ring), BPF_RB_RING_SIZE) / 2)

#endif
