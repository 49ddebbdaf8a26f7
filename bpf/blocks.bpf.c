// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Block devices: how long requests waited in the queue and then in the device, who asked for them
 * and which control group they are charged to.
 *
 * Who asked is the task that runs when the request starts. Writeback, and what a limit of I/O held
 * back, is started by a kernel thread: then only the group is known.
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
#include "party.h"
#include "share.h"

#define OPERATION 0xff	  /* REQ_OP_MASK: the operation within cmd_flags */
#define ROWS 0		  /* what is shared: `what` of within_share */
#define EVERYBODY (~0ULL) /* stands for all parties; no party has this number */
#define HANDED_IN (~1ULL) /* the party of what a kernel thread starts; no party has this number */

/* New rows in a window (share.h): first come, first served; then for each party. */
const volatile u64 free_rows = 1024;
const volatile u64 most_rows_of_one_party = 256;

SWAPPED_ROWS(requests, struct block_key, struct block_value, 4096)
SPARE_ROWS(requests, struct block_key, struct block_value, 512)

struct in_flight {
	struct block_key key;
	u64 began_ns;
	u64 issued_ns;
	u64 party; /* who asked */
	u32 bytes;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, u64);
	__type(value, struct in_flight);
} in_flight SEC(".maps");

static __always_inline void begin(struct request *rq, u64 began, u64 issued)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task_btf();
	u64 id = (u64)rq;
	struct cgroup *group = BPF_CORE_READ(rq, bio, bi_blkg, blkcg, css.cgroup);
	struct gendisk *disk = BPF_CORE_READ(rq, q, disk);
	struct in_flight f = {.began_ns = began, .issued_ns = issued, .bytes = rq->__data_len};

	f.party = HANDED_IN;
	if (!(task->flags & PF_KTHREAD)) {
		if (!watched(task->tgid))
			return;
		f.key.tgid = task->tgid;
		f.key.start_ns = start_of(task);
		f.party = party_of(task);
	} else if (filter_targets) {
		return;
	}
	f.key.device = (u32)BPF_CORE_READ(disk, major) << 20 | BPF_CORE_READ(disk, first_minor);
	f.key.operation = rq->cmd_flags & OPERATION;
	if (group) {
		f.key.cgroup = BPF_CORE_READ(group, kn, id);
		f.key.hierarchy = BPF_CORE_READ(group, root, hierarchy_id);
	}
	if (bpf_map_update_elem(&in_flight, &id, &f, BPF_ANY))
		count_loss(LOSS_REQUESTS);
}

SEC("tp_btf/block_io_start")
int BPF_PROG(on_start, struct request *rq)
{
	begin(rq, bpf_ktime_get_ns(), 0);
	return 0;
}

SEC("tp_btf/block_rq_issue")
int BPF_PROG(on_issue, struct request *rq)
{
	u64 id = (u64)rq;
	struct in_flight *f = bpf_map_lookup_elem(&in_flight, &id);

	if (f) {
		f->issued_ns = bpf_ktime_get_ns();
		f->bytes = rq->__data_len; /* others may have been merged into it */
	}
	return 0;
}

/* Kernels before 6.5 have no block_io_start: a request is first seen when it is issued. */
SEC("tp_btf/block_rq_issue")
int BPF_PROG(on_first_issue, struct request *rq)
{
	u64 now = bpf_ktime_get_ns(), began = rq->start_time_ns;

	begin(rq, began && began < now ? began : now, now);
	return 0;
}

static __always_inline void end(struct request *rq)
{
	const struct block_value zero = {};
	u64 id = (u64)rq, now = bpf_ktime_get_ns(), all;
	struct in_flight *f = bpf_map_lookup_elem(&in_flight, &id);
	const struct block_key rest = {};
	struct block_key key;
	struct block_value *v;
	u64 queue;

	if (!f)
		return;
	key = f->key;
	v = known_row(&requests, &key);
	if (!v && (within_share(EVERYBODY, ROWS, free_rows) ||
		   within_share(f->party, ROWS, most_rows_of_one_party)))
		v = find_row(&requests, &key, &zero);
	if (!v) { /* counted by device and operation alone */
		key.tgid = 0;
		key.start_ns = 0;
		key.cgroup = 0;
		key.hierarchy = 0;
		v = spare_row_of(&requests_spare, &key, &zero, &rest);
	}
	if (v) {
		all = now - f->began_ns;
		queue = f->issued_ns ? f->issued_ns - f->began_ns : 0;
		ADD_TO(v->count, 1);
		ADD_TO(v->bytes, f->bytes);
		ADD_TO(v->queue_ns, queue);
		ADD_TO(v->device_ns, all - queue);
		if (all > v->max_ns)
			v->max_ns = all;
	}
	bpf_map_delete_elem(&in_flight, &id);
}

SEC("tp_btf/block_io_done")
int BPF_PROG(on_done, struct request *rq)
{
	end(rq);
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(on_complete, struct request *rq, int error, unsigned int bytes)
{
	if (bytes >= rq->__data_len)
		end(rq);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
