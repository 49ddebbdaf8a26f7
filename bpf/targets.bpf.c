// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Keeps the set of watched processes: children of a watched process are watched from birth. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#define SONDE_MAX_STACKS 1 /* takes none */
#include "stack.h"
#include "task.h"

SEC("tp_btf/sched_process_fork")
int BPF_PROG(on_fork, struct task_struct *parent, struct task_struct *child)
{
	u32 from = parent->tgid, to = child->tgid;
	u8 yes = 1;

	if (from != to && bpf_map_lookup_elem(&targets, &from) &&
	    bpf_map_update_elem(&targets, &to, &yes, BPF_ANY))
		count_loss(LOSS_TARGETS_FULL);
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(on_exit, struct task_struct *task)
{
	u32 tgid = task->tgid;

	if (!BPF_CORE_READ(task, signal, live.counter)) /* the last of its threads */
		bpf_map_delete_elem(&targets, &tgid);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
