// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Whole stacks of the launches that the injected library times: it calls an empty function with the launch's
 * number (abi/inject.h, INJECT_SITE), and a uprobe on that takes the stack.
 */
#include "kernel_types.h"
#define __VMLINUX_H__ /* bpf_tracing.h: registers by the names the kernel gives them */
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#include "stack.h"
#include "task.h"
#include "walk_scratch.h"
#include "host_types.h"
#include "party.h"
#include "share.h"

SWAPPED_ROWS(launch_sites, struct launch_site_key, struct launch_site_value, 32768)

enum shared { BY_PROCESS, BY_PARTY }; /* `what` of within_share */

/* Rows in a window (share.h). */
const volatile u64 most_of_one_process = 1024;
const volatile u64 most_of_one_party = 2048;

/*
 * Every process that maps the library can call the site, with any number. So rows and stacks are bounded for
 * each process and each party: who fills that costs nobody else's launches.
 */
static __always_inline bool has_share(struct task_struct *task)
{
	if (within_share(task->tgid, BY_PROCESS, most_of_one_process) &&
	    within_share(party_of(task), BY_PARTY, most_of_one_party))
		return true;
	count_loss(LOSS_SHARE);
	return false;
}

NO_PROGRAMS(no_programs);

SEC("uprobe")
int on_launch_site(struct pt_regs *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	const struct launch_site_value zero = {};
	struct launch_site_key key = {.tgid = task->tgid};
	struct launch_site_value *row;
	struct walk_scratch *mine;

	STAY_ON_STACK(ctx, no_programs);
	if (!watched(key.tgid) || !has_share(task))
		return 0;
	mine = scratch_claim();
	if (!mine)
		return 0;
	key.start_ns = start_of(task);
	key.correlation = PT_REGS_PARM1(ctx);
	row = row_of(&launch_sites, &key, &zero);
	if (row) { /* without kernel frames: those are the uprobe's */
		mine->walk.pieces[0].kernel_len = 0;
		mine->walk.stop = STOP_ENTRY;
		unwind(ctx, &mine->walk, task, 0);
		row->stack_id = keep_walk(&mine->walk, seed_of(task, key.start_ns));
	}
	scratch_release(mine);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
