/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What one party may take of a map or ring that all share, in about a second. Include host_types.h
 * before it.
 *
 * A party is somebody who cannot make more of themselves. Either a container that the machine's root
 * started, known by its outermost pid namespace, with all user ids and user namespaces inside; or a
 * user, with all subordinate user ids and all namespaces that are theirs. The machine's own root is
 * under no limit.
 * src/sonde/procfs/parties.py has the same rule.
 */
#ifndef SONDE_SHARE_H
#define SONDE_SHARE_H

#define SHARE_WINDOW_SHIFT 30	/* 1.07 s */
#define SHARE_NAMESPACES 33	/* levels of user namespaces: the kernel makes no more */
#define SHARE_OF_DEEPER (~0ull) /* the party of all that are deeper all the same */

struct share_key {
	u64 party;
	u64 what; /* number of what is shared, as the caller chose it */
};

struct share {
	u64 window; /* time >> SHARE_WINDOW_SHIFT */
	u64 taken;  /* in that window */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 2048);
	__type(key, struct share_key);
	__type(value, struct share);
} shares SEC(".maps");

/* The outermost pid namespace below the machine's that `pid` is in; 0: in none. */
static __always_inline u64 outermost_pid_namespace(struct pid *pid)
{
	u64 at = 0;

	if (!BPF_CORE_READ(pid, level))
		return 0;
	/* pid->numbers[1]: its size is that of the running kernel. */
	bpf_probe_read_kernel(&at, sizeof(at),
			      (void *)((u64)__builtin_preserve_access_index(&pid->numbers[0]) +
				       bpf_core_type_size(struct upid) +
				       bpf_core_field_offset(struct upid, ns)));
	return at;
}

/* Whose `task` is; 0 for the machine's root. Pointers are kernel addresses, so never a user's number. */
static __always_inline u64 party_of(struct task_struct *task)
{
	struct task_struct___owner *t = (void *)task;
	struct user_namespace *inner = BPF_CORE_READ(t, real_cred, user_ns), *outer;
	struct pid *pid = BPF_CORE_READ(t, group_leader, thread_pid);
	u64 container = outermost_pid_namespace(pid);
	bool is_found = false;
	u32 owner = 0;

	if (container && !BPF_CORE_READ((struct pid_namespace *)container, user_ns, parent))
		return container; /* in the machine's own user namespace: its root started it */
	for (u32 i = 0; i < SHARE_NAMESPACES; i++) {
		outer = BPF_CORE_READ(inner, parent);
		if (!outer) /* in the machine's own */
			is_found = true;
		else if (!BPF_CORE_READ(outer, parent)) { /* the outermost one: whose it is */
			owner = BPF_CORE_READ(inner, owner.val);
			is_found = true;
		}
		if (is_found)
			break;
		inner = outer;
	}
	if (!is_found)
		return SHARE_OF_DEEPER;
	return owner ?: container ?: BPF_CORE_READ(t, real_cred, uid.val);
}

/* Whether `party` took less than `most` of `what` in this window; counts one more. Party 0 has no limit. */
static __always_inline bool within_share(u64 party, u64 what, u64 most)
{
	const struct share_key key = {.party = party, .what = what};
	u64 window = bpf_ktime_get_ns() >> SHARE_WINDOW_SHIFT;
	const struct share first = {.window = window, .taken = 1};
	struct share *it;

	if (!party)
		return true;
	it = bpf_map_lookup_elem(&shares, &key);
	if (!it) {
		bpf_map_update_elem(&shares, &key, &first, BPF_ANY);
		return true;
	}
	if (it->window != window) { /* two CPUs here at once let in a few more than the share */
		it->taken = 0;
		it->window = window;
	}
	return __sync_fetch_and_add(&it->taken, 1) < most;
}

/* The same for a ring buffer, of which half is first come, first served: shares count beyond that. */
#define WITHIN_SHARE_OF_RING(ring, task, what, most)                                               \
	(within_share(party_of(task), (what), (most)) ||                                           \
	 bpf_ringbuf_query(&(ring), BPF_RB_AVAIL_DATA) <                                           \
		 bpf_ringbuf_query(&(ring), BPF_RB_RING_SIZE) / 2)

#endif
