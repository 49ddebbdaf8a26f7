// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* On-CPU: at every tick of a CPU's sampling clock, one more for the stack that runs there. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#include "stack.h"
#include "task.h"

SWAPPED_ROWS(samples, struct cpu_key, struct cpu_value, 8192)

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct unwind_walk);
} scratch SEC(".maps");

SEC("perf_event")
int on_sample(struct bpf_perf_event_data *ctx)
{
	const u32 first = 0;
	const struct cpu_value zero = {};
	struct task_struct *task = (void *)bpf_get_current_task();
	u64 pid_tgid = bpf_get_current_pid_tgid();
	struct cpu_key key = {.tgid = pid_tgid >> 32, .tid = (u32)pid_tgid};
	struct unwind_walk *w = bpf_map_lookup_elem(&scratch, &first);
	struct cpu_value *row;

	if (!w || !key.tid || !watched(key.tgid))
		return 0;
	key.start_ns = start_of(task);
	key.stack_id = stack_take(ctx, w, key.start_ns ^ key.tgid, has_user_frames(task), 0);
	row = row_of(&samples, &key, &zero);
	if (row)
		row->count++;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
