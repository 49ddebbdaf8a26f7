/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * More of the kernel's types, as kernel_types.h has them, for the programs that read its counters:
 * accounting of tasks, control groups, run queues, block requests, sockets. A type with ___ in its
 * name is that of the name before it, with other fields.
 */
#ifndef SONDE_HOST_TYPES_H
#define SONDE_HOST_TYPES_H

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sched_info {
	unsigned long pcount; /* times it got a CPU */
	unsigned long long run_delay;
	unsigned long long last_queued;
};

struct sched_entity {
	u64 sum_exec_runtime;
	u64 nr_migrations;
};

struct task_io_accounting {
	u64 read_bytes;
	u64 write_bytes;
};

struct kernfs_node {
	u64 id;
};

struct cgroup_root {
	int hierarchy_id;
};

struct cgroup {
	struct kernfs_node *kn;
	struct cgroup_root *root;
};

struct cgroup_subsys_state {
	struct cgroup *cgroup;
};

struct css_set {
	struct cgroup_subsys_state *subsys[16];
	struct cgroup *dfl_cgrp;
};

typedef struct {
	unsigned int val;
} kuid_t;

struct cred {
	kuid_t uid;
};

struct upid {
	int nr;
};

struct pid {
	unsigned int level;
	struct upid numbers[1];
};

struct task_struct___counters {
	struct sched_info sched_info;
	struct sched_entity se;
	unsigned long nvcsw;
	unsigned long nivcsw;
	unsigned long min_flt;
	unsigned long maj_flt;
	struct task_io_accounting ioac;
};

struct task_struct___owner {
	int tgid;
	struct task_struct___owner *real_parent;
	struct task_struct___owner *group_leader;
	struct css_set *cgroups;
	const struct cred *real_cred;
	struct pid *thread_pid;
};

enum cgroup_subsys_id___here {
	memory_cgrp_id___here = 1,
	freezer_cgrp_id___here = 2,
	pids_cgrp_id___here = 3,
};

#pragma clang attribute pop

#endif
