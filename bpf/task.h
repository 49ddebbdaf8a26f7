/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Which process a task is of, whether that is watched, and two maps of rows that user space swaps. */
#ifndef SONDE_TASK_H
#define SONDE_TASK_H

#define PF_IO_WORKER 0x00000010	  /* a kernel thread of io_uring, in the process it works for */
#define PF_USER_WORKER 0x00004000 /* since 6.4: the same for others, such as vhost */
#define PF_KTHREAD 0x00200000

/* Watched processes, shared by all objects and kept by targets.bpf.c; unused unless filter_targets. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u32);
	__type(value, u8);
} targets SEC(".maps");

const volatile bool filter_targets = false;
const volatile u32 self_tgid =
	0; /* the agent itself is watched like any other unless this is set */

static __always_inline bool watched(u32 tgid)
{
	if (self_tgid && tgid == self_tgid)
		return false;
	return !filter_targets || bpf_map_lookup_elem(&targets, &tgid);
}

/* Kernel threads never had user frames; a thread that is exiting has given its memory back. */
static __always_inline bool has_user_frames(struct task_struct *task)
{
	return task->mm && !(task->flags & (PF_KTHREAD | PF_USER_WORKER | PF_IO_WORKER));
}

/* When the task's process started, in ns of CLOCK_BOOTTIME. */
static __always_inline u64 start_of(struct task_struct *task)
{
	return task->group_leader->start_boottime;
}

/*
 * Rows are summed in one of two hash maps while user space reads and empties the other. The swap
 * is an update of a map in a map, which returns only when no program still holds the old one:
 * nothing is lost and nothing is counted twice.
 */
#define SWAPPED_ROWS(name, key_type, value_type, entries)                                          \
	struct name##_rows {                                                                       \
		__uint(type, BPF_MAP_TYPE_HASH);                                                   \
		__uint(max_entries, entries);                                                      \
		__type(key, key_type);                                                             \
		__type(value, value_type);                                                         \
	} name##_a SEC(".maps"), name##_b SEC(".maps");                                            \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);                                          \
		__uint(max_entries, 1);                                                            \
		__type(key, u32);                                                                  \
		__array(values, struct name##_rows);                                               \
	} name SEC(".maps") = {                                                                    \
		.values = {&name##_a},                                                             \
	};

/*
 * Coarser rows for what found no room in `name`: the same key, in which what is finer is 0, or a value for
 * all where 0 is one among others (SYSCALLS_ALL, CALL_ANY_DIRECTION). User space keeps a row in them whose key is all zero, for what finds no room even here: totals are never lost,
 * however many processes and threads somebody starts. Several CPUs add to one such row at a time.
 */
#define SPARE_ROWS(name, key_type, value_type, entries)                                            \
	SWAPPED_ROWS(name##_spare, key_type, value_type, entries)

/* The row under `key`; NULL where there is none. */
static __always_inline void *known_row(void *rows_in_use, const void *key)
{
	const u32 first = 0;
	void *rows = bpf_map_lookup_elem(rows_in_use, &first);

	return rows ? bpf_map_lookup_elem(rows, key) : NULL;
}

/* The row under `key`, made with `zero` where it is new; NULL when there is no room. */
static __always_inline void *find_row(void *rows_in_use, const void *key, const void *zero)
{
	const u32 first = 0;
	void *rows = bpf_map_lookup_elem(rows_in_use, &first);
	void *row;

	if (!rows)
		return NULL;
	row = bpf_map_lookup_elem(rows, key);
	if (row)
		return row;
	bpf_map_update_elem(rows, key, zero, BPF_NOEXIST);
	return bpf_map_lookup_elem(rows, key);
}

/* The same, for rows that have no coarser ones: what finds no room is lost. */
static __always_inline void *row_of(void *rows_in_use, const void *key, const void *zero)
{
	void *row = find_row(rows_in_use, key, zero);

	if (!row)
		count_loss(LOSS_COUNT_MAP_FULL);
	return row;
}

/* The one row for all the rest, whose key is `rest`: all zero. */
static __always_inline void *rest_row_of(void *spare_in_use, const void *rest)
{
	void *row = known_row(spare_in_use, rest);

	count_loss(row ? LOSS_TOGETHER : LOSS_COUNT_MAP_FULL);
	return row;
}

/* The coarser row under `key`, else the one for all the rest, whose key is `rest`: all zero. */
static __always_inline void *spare_row_of(void *spare_in_use, const void *key, const void *zero,
					  const void *rest)
{
	void *row = find_row(spare_in_use, key, zero);

	if (row) {
		count_loss(LOSS_BY_PROCESS);
		return row;
	}
	return rest_row_of(spare_in_use, rest);
}

/* Adds to a row that other CPUs may be adding to as well. */
#define ADD_TO(field, more)                                                                        \
	do {                                                                                       \
		if (more)                                                                          \
			__sync_fetch_and_add(&(field), (more));                                    \
	} while (0)

/* Raises a maximum of such a row; of two CPUs at the same moment, the lower value may remain. */
#define RAISE_TO(field, value)                                                                     \
	do {                                                                                       \
		if ((value) > (field))                                                             \
			(field) = (value);                                                         \
	} while (0)

#endif
