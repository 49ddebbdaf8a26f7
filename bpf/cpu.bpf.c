// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* On-CPU: at every tick of a CPU's sampling clock, one more for the stack that runs there. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#include "stack.h"
#include "task.h"
#include "chosen.h"
#include "trace_context.h"

SWAPPED_ROWS(samples, struct cpu_key, struct cpu_value, 8192)
SPARE_ROWS(samples, struct cpu_key, struct cpu_value, 1024)

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct unwind_walk);
} scratch SEC(".maps");

/* The context of the program, whose reads the kernel translates: of whole words alone, at the offsets of
 * linux/bpf_perf_event.h. It begins with pt_regs: on x86 `cs` is the 18th. */
struct bpf_perf_event_data {
	u64 before_cs[17];
	volatile u64 cs;
};

/* Whether the sampling clock interrupted user code: then there is no kernel stack. False where that is not known. */
static __always_inline bool in_user_code(const struct bpf_perf_event_data *ctx)
{
#if defined(__TARGET_ARCH_x86)
	return ctx->cs & 3;
#else
	return false;
#endif
}

SEC("perf_event")
int on_sample(struct bpf_perf_event_data *ctx)
{
	const u32 first = 0;
	const struct cpu_value zero = {};
	const struct cpu_key rest = {};
	struct task_struct *task = bpf_get_current_task_btf();
	u64 pid_tgid = bpf_get_current_pid_tgid();
	struct cpu_key key = {.tgid = pid_tgid >> 32, .tid = (u32)pid_tgid};
	struct unwind_walk *w = bpf_map_lookup_elem(&scratch, &first);
	enum closeness closeness = closeness_of(key.tgid);
	struct cpu_value *row;

	if (!w || !key.tid || !watched(key.tgid) || closeness == NOT_CHOSEN)
		return 0;
	key.start_ns = start_of(task);
	if (closeness == WITH_STACKS)
		key.stack_id = stack_of(ctx, w, seed_of(task, key.start_ns), !in_user_code(ctx),
					has_user_frames(task), 0);
	if (trace_requests)
		note_traced(task, key.stack_id, bpf_ktime_get_ns(), TRACED_CPU, 1, 0, 0);
	row = find_row(&samples, &key, &zero);
	if (!row) {
		key.tid = 0;
		key.stack_id = 0;
		row = spare_row_of(&samples_spare, &key, &zero, &rest);
	}
	if (row)
		ADD_TO(row->count, 1);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
