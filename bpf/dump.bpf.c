// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The stacks of all threads of one process now, for those that are not on a CPU. A thread that runs
 * has its registers in its CPU: the CPU sampler (cpu.bpf.c) sees it.
 *
 * The walk is that of all programs, but reads another task's memory from pages that user space has copied
 * into a map (other_memory.h): a thread whose walk lacked a page is walked again once that is there.
 */
#define SONDE_READS_OTHERS
#define SONDE_MAX_STACKS 4096
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#include "stack.h"
#include "task.h"

const volatile u32 dump_tgid = 0;

/* A row a thread; user space loads it with room for as many as the process has. */
SWAPPED_ROWS(dumped, struct dump_key, struct dump_value, 65536)

/* One walk at a time: user space runs the iterator alone. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct unwind_walk);
} scratch SEC(".maps");

static __always_inline u32 state_of(struct task_struct *task)
{
	if (bpf_core_field_exists(task->__state))
		return BPF_CORE_READ(task, __state);
	return BPF_CORE_READ((struct task_struct___before_5_14 *)task, state);
}

SEC("iter/task")
int on_dump(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	const struct dump_value zero = {};
	const u32 first = 0;
	struct dump_key key = {};
	struct unwind_walk *w;
	struct dump_value *row;
	struct sonde_stack *s;
	struct other_state *memory = other_memory();
	u32 misses;
	long n;

	if (!task || task->tgid != dump_tgid || !memory || memory->is_full)
		return 0;
	w = bpf_map_lookup_elem(&scratch, &first);
	if (!w)
		return 0;
	key.tgid = task->tgid;
	key.tid = task->pid;
	key.start_ns = start_of(task);
	row = row_of(&dumped, &key, &zero);
	if (!row || row->stack_id) /* no room; walked already */
		return 0;
	row->state = state_of(task) | BPF_CORE_READ(task, exit_state);
	row->on_cpu = task->on_cpu;
	if (row->on_cpu)
		return 0;
	s = &w->pieces[0];
	n = bpf_get_task_stack(task, s->kernel, sizeof(s->kernel), 0);
	s->kernel_len = n > 0 ? (u32)n / sizeof(u64) : 0;
	w->piece = 0;
	w->slot = 0;
	w->stop = STOP_ENTRY;
	misses = memory->misses;
	if (has_user_frames(task))
		unwind(ctx, w, task, 0);
	if (memory->misses == misses)
		row->stack_id = keep_walk(w, seed_of(task, key.start_ns));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
