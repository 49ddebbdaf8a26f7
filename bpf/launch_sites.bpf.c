// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Whole stacks of the launches that the library in a profiled process times: it calls an empty function
 * with the launch's number (abi/inject.h, INJECT_SITE), and the stack is taken there.
 */
#include "kernel_types.h"
#define __VMLINUX_H__ /* bpf_tracing.h: registers by the names the kernel gives them */
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#include "stack.h"
#include "task.h"

SWAPPED_ROWS(launch_sites, struct launch_site_key, struct launch_site_value, 8192)

/*
 * Programs on uprobes stay on their CPU but can be preempted by others: a few places for each CPU,
 * one taken by each walk that is under way.
 */
#define SCRATCH_SLOTS 2

struct site_scratch {
	u64 is_taken;
	struct unwind_walk walk;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SCRATCH_SLOTS);
	__type(key, u32);
	__type(value, struct site_scratch);
} scratch SEC(".maps");

SEC("uprobe")
int on_launch_site(struct pt_regs *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	const struct launch_site_value zero = {};
	struct launch_site_key key = {.tgid = task->tgid};
	struct launch_site_value *row;
	struct site_scratch *mine = NULL;

	if (!watched(key.tgid))
		return 0;
	for (u32 slot = 0; slot < SCRATCH_SLOTS; slot++) {
		const u32 at = slot;

		mine = bpf_map_lookup_elem(&scratch, &at);
		if (mine && !__sync_lock_test_and_set(&mine->is_taken, 1))
			break;
		mine = NULL;
	}
	if (!mine) {
		count_stop(STOP_BUSY);
		count_loss(LOSS_USER_STACK);
		return 0;
	}
	key.start_ns = start_of(task);
	key.correlation = PT_REGS_PARM1(ctx);
	row = row_of(&launch_sites, &key, &zero);
	if (row) { /* without the kernel's frames: those are the probe's own */
		mine->walk.pieces[0].kernel_len = 0;
		mine->walk.stop = STOP_ENTRY;
		unwind(ctx, &mine->walk, task, 0);
		row->stack_id = keep_walk(&mine->walk, key.start_ns ^ key.tgid);
	}
	__sync_lock_test_and_set(&mine->is_taken, 0);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
