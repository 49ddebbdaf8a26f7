/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Whose a task is. Include host_types.h before it.
 *
 * A party is somebody who cannot make more of themselves. Either a container that the machine's root
 * started, known by its outermost pid namespace, with all user ids and user namespaces inside; or a
 * user, with all subordinate user ids and all namespaces that are theirs. 0: the machine's own root.
 * src/sonde/procfs/parties.py has the same rule.
 */
#ifndef SONDE_PARTY_H
#define SONDE_PARTY_H

#define SHARE_NAMESPACES 33	/* levels of user namespaces: the kernel makes no more */
#define SHARE_OF_DEEPER (~0ull) /* the party of all that are deeper all the same */

/*
 * The users who have subordinate ids (/etc/subuid; a program whose owner is such an id and that sets it when
 * executed has it in the machine's own user namespace). Filled by user space; by the id in network order.
 */
struct subordinate_id {
	u32 bits;
	u32 id;
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536); /* prefixes, some twelve a user */
	__type(key, struct subordinate_id);
	__type(value, u32);
} subordinate_ids SEC(".maps");

/* Whose a user id is. */
static __always_inline u32 user_of(u32 id)
{
	const struct subordinate_id key = {.bits = 32, .id = __builtin_bswap32(id)};
	u32 *holder = bpf_map_lookup_elem(&subordinate_ids, &key);

	return holder ? *holder : id;
}

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
	if (owner)
		return user_of(owner);
	return container ?: user_of(BPF_CORE_READ(t, real_cred, uid.val));
}

#endif
