// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * System calls by process: how many, how long, how many failed. A call counts when it returns. Runs twice
 * on every call of the machine, so it is off unless asked for.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#define SONDE_MAX_STACKS 1 /* takes none */
#include "stack.h"
#include "task.h"
#include "host_types.h"
#include "storage_share.h"
#include "row_share.h"

#define MAX_ERRNO 4095
/* Numbers from here on are of no call that the kernel has, or of x32's; all count as this one. */
#define CALL_NUMBERS 1024

SWAPPED_ROWS(syscalls, struct syscall_key, struct syscall_value, 16384)
SPARE_ROWS(syscalls, struct syscall_key, struct syscall_value, 2048)

struct calling {
	u64 since_ns; /* 0: not in a call */
	u64 start_ns; /* of the process */
	u32 nr;
	u64 party;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct calling);
} threads SEC(".maps");

SEC("tp_btf/sys_enter")
int BPF_PROG(on_enter, struct pt_regs *regs, long nr)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task_btf();
	struct calling *c;

	if (!watched(task->tgid))
		return 0;
	c = TASK_STORAGE(threads, task);
	if (!c) {
		count_loss(LOSS_TASK_STORAGE);
		return 0;
	}
	if (!c->start_ns)
		c->start_ns = start_of(task);
	c->nr = (u64)nr < CALL_NUMBERS ? nr : CALL_NUMBERS;
	c->since_ns = bpf_ktime_get_ns();
	return 0;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(on_exit, struct pt_regs *regs, long result)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task_btf();
	struct calling *c = bpf_task_storage_get(&threads, task, 0, 0);
	const struct syscall_value zero = {};
	const struct syscall_key rest = {};
	struct syscall_key key = {};
	struct syscall_value *v;
	u64 ns;

	if (!c || !c->since_ns)
		return 0;
	ns = bpf_ktime_get_ns() - c->since_ns;
	c->since_ns = 0;
	key.tgid = task->tgid;
	key.nr = c->nr;
	key.start_ns = c->start_ns;
	v = fair_row(&syscalls, &key, &zero, c->party, key.start_ns);
	if (!v) {
		key.nr = SYSCALLS_ALL; /* not 0, which is read() */
		v = fair_spare_row(&syscalls_spare, &key, &zero, &rest, c->party, key.start_ns);
	}
	if (!v)
		return 0;
	ADD_TO(v->count, 1);
	ADD_TO(v->ns, ns);
	ADD_TO(v->errors, result < 0 && result >= -MAX_ERRNO);
	RAISE_TO(v->max_ns, ns);
	return 0;
}

/* Run by user space over all tasks before each drain. */
SEC("iter/task")
int on_recount(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct calling *c = task ? bpf_task_storage_get(&threads, task, 0, 0) : NULL;

	RECOUNT(ctx, c, !task);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
