/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * More of the kernel's types, as kernel_types.h has them, for the programs that read its counters:
 * accounting of tasks, control groups, run queues, block requests, sockets. A type with ___ in its
 * name (a flavor of CO-RE) is the kernel's type of the name before it, with other fields.
 */
#ifndef SONDE_HOST_TYPES_H
#define SONDE_HOST_TYPES_H

enum {
	BPF_MAP_TYPE_SK_STORAGE = 24,
	BPF_SK_STORAGE_GET_F_CREATE = 1,
};

/* As in linux/bpf.h: known to the kernel by its name and size. */
struct bpf_timer {
	u64 opaque[2];
} __attribute__((aligned(8)));

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sched_info {
	unsigned long pcount; /* times it got a CPU */
	unsigned long long run_delay;
	unsigned long long last_queued;
};

struct rq {
	unsigned int nr_running;
	u64 nr_switches;
	u64 clock;
	atomic_t nr_iowait;
};

struct cfs_rq {
	struct rq *rq;
};

struct sched_entity {
	u64 sum_exec_runtime;
	u64 nr_migrations;
	struct cfs_rq *cfs_rq;
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

struct gendisk {
	int major;
	int first_minor;
};

struct request_queue {
	struct gendisk *disk;
};

struct blkcg {
	struct cgroup_subsys_state css;
};

struct blkcg_gq {
	struct blkcg *blkcg;
};

struct bio {
	struct blkcg_gq *bi_blkg;
};

struct request {
	struct request_queue *q;
	unsigned int cmd_flags;
	unsigned int __data_len;
	struct bio *bio;
	u64 start_time_ns;
};

struct in6_addr {
	union {
		u32 u6_addr32[4];
	} in6_u;
};

struct sock_common {
	u32 skc_daddr;
	u16 skc_dport; /* big-endian */
	u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	struct in6_addr skc_v6_daddr;
};

struct sock {
	struct sock_common __sk_common;
	u16 sk_type;
	u16 sk_protocol;
	int sk_wmem_queued;
};

struct tcp_sock {
	u64 bytes_sent;
	u64 bytes_received;
	u64 bytes_retrans;
	u32 segs_out;
	u32 segs_in;
	u32 total_retrans;
	u32 srtt_us;
	u32 rcv_nxt;
	u32 copied_seq;
};

struct socket {
	struct sock *sk;
};

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	u32 fd;
	struct file *file;
};

struct bpf_iter__bpf_sk_storage_map {
	struct bpf_iter_meta *meta;
	struct sock *sk;
	void *value;
};

struct user_namespace {
	struct user_namespace *parent;
	kuid_t owner;
};

struct cred {
	kuid_t uid;
	struct user_namespace *user_ns;
};

struct pid_namespace {
	struct user_namespace *user_ns;
};

struct upid {
	int nr;
	struct pid_namespace *ns;
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

struct mm_struct {
	unsigned long env_start;
	unsigned long env_end;
};

struct task_struct___owner {
	char comm[16];
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
