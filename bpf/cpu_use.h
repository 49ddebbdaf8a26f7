/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the kernel itself counts of a thread: for waits of which it did not run a program. Include host_types.h before. */
#ifndef SONDE_CPU_USE_H
#define SONDE_CPU_USE_H

/* What a thread had of its CPUs. */
struct cpu_use {
	u64 run_ns;
	u64 ready_ns; /* in run queues, until it last left one */
	u64 switches; /* how often it left a CPU; 0: not known */
};

static __always_inline struct cpu_use use_of(struct task_struct *task)
{
	struct task_struct___counters *counted = (void *)task;
	struct cpu_use use = {
		.run_ns = counted->se.sum_exec_runtime,
		.switches = counted->nvcsw + counted->nivcsw,
	};

	if (bpf_core_field_exists(counted->sched_info.run_delay)) /* CONFIG_SCHED_INFO */
		use.ready_ns = counted->sched_info.run_delay;
	return use;
}

/* Since when a thread that gets its CPU now was in the run queue, as the kernel counts it; 0: not known. */
static __always_inline u64 ready_since(struct task_struct *task, u64 now)
{
	struct task_struct___counters *counted = (void *)task;
	u64 queued, ns;

	if (!bpf_core_field_exists(counted->sched_info.last_queued))
		return 0;
	queued = counted->sched_info.last_queued;
	ns = counted->se.cfs_rq->rq->clock - queued;
	return queued && ns < now ? now - ns : 0;
}

#endif
