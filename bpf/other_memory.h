/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Memory of other tasks, as user space has read it. A program that reads it itself waits until its pages
 * are in memory, and their owner decides how long that takes (FUSE, userfaultfd): meanwhile the program
 * cannot be ended, and no other BPF program on the machine can be removed. So a page that is not in the map
 * yet is asked for, and the walk is made again once it has come.
 */
#ifndef SONDE_OTHER_MEMORY_H
#define SONDE_OTHER_MEMORY_H

#define OTHER_PAGE 4096
#define OTHER_TAIL 16 /* bytes of the next page: as far as a single read may reach into it */
#define OTHER_MOST_READ 1024
#define OTHER_PAGES 4096
#define OTHER_PAGES_WANTED 512

struct other_page_key {
	u32 tid;
	u32 switches; /* of the thread, so far: pages read before it last ran are not found */
	u64 page;     /* address / OTHER_PAGE */
};
struct other_page {
	u64 bytes; /* of `content`: as many as could be read */
	u8 content[OTHER_PAGE + OTHER_TAIL];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, OTHER_PAGES);
	__type(key, struct other_page_key);
	__type(value, struct other_page);
} other_pages SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, OTHER_PAGES_WANTED);
	__type(key, struct other_page_key);
	__type(value, u32);
} other_pages_wanted SEC(".maps");

struct other_state {
	u32 misses;   /* reads of pages that are not in the map, so far */
	u32 any_time; /* 1: pages count though their thread ran since: one that runs all the time */
	u32 is_full;  /* 1: other_pages_wanted has no room until user space has emptied it */
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct other_state);
} other_state SEC(".maps");

static __always_inline struct other_state *other_memory(void)
{
	const u32 first = 0;

	return bpf_map_lookup_elem(&other_state, &first);
}

/* Sets `key` to the page that `from` lies in. Returns 0 where it is in the map, else asks for it. */
static __noinline long find_other(struct other_page_key *key, struct task_struct *task, u64 from)
{
	struct other_state *state = other_memory();
	const u32 one = 1;

	if (!state)
		return -1;
	key->tid = task->pid;
	key->switches = state->any_time ? 0 : (u32)(task->nvcsw + task->nivcsw);
	key->page = from / OTHER_PAGE;
	if (bpf_map_lookup_elem(&other_pages, key))
		return 0;
	state->misses++;
	if (bpf_map_update_elem(&other_pages_wanted, key, &one, BPF_ANY))
		state->is_full = 1;
	return -1;
}

static __always_inline long read_user(struct task_struct *task, void *to, u32 size, u64 from)
{
	u32 at = from & (OTHER_PAGE - 1);
	struct other_page_key key = {};
	struct other_page *page;

	if (find_other(&key, task, from))
		return -1;
	page = bpf_map_lookup_elem(&other_pages, &key);
	if (!page || at + size > page->bytes)
		return -1;
	return bpf_probe_read_kernel(to, size, page->content + at);
}

#endif
