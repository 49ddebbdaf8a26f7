/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Which traced request a thread works on: known by traces.bpf.c, looked up where samples and waits are
 * counted. The maps are those of unwind.bpf.c.
 */
#ifndef SONDE_TRACE_CONTEXT_H
#define SONDE_TRACE_CONTEXT_H

const volatile bool trace_requests = false;

/* Of a thread, since it received a request. */
struct trace_context {
	u64 born_ns;  /* when the thread began: another one may get its number */
	u64 trace_hi; /* 0 and 0: no traced request, or several at once */
	u64 trace_lo;
	u64 span_id; /* of the caller's span, as in the header */
	u64 sock;    /* that the request came by */
	u64 party;   /* whose the thread is (party.h); 0: the machine's root */
	u32 open;    /* requests that are not answered yet */
	u32 unused;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, u32);
	__type(value, struct trace_context);
} trace_contexts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 512 * 1024);
} traced SEC(".maps");

#define TRACED_OF_ONE                                                                              \
	512 /* samples and waits of a party in a window: trace ids are everybody's to choose */
#define TRACED_WINDOW_SHIFT 30 /* 1.07 s */

struct traced_share {
	u64 window; /* time >> TRACED_WINDOW_SHIFT */
	u64 taken;  /* in that window */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 2048);
	__type(key, u64);
	__type(value, struct traced_share);
} traced_shares SEC(".maps");

/* Whether a party noted less than its share in this window; counts one more. The machine's root has no limit. */
static __always_inline bool within_traced_share(u64 party, u64 now)
{
	const struct traced_share first = {.window = now >> TRACED_WINDOW_SHIFT, .taken = 1};
	struct traced_share *it = party ? bpf_map_lookup_elem(&traced_shares, &party) : NULL;

	if (!party)
		return true;
	if (!it) {
		bpf_map_update_elem(&traced_shares, &party, &first, BPF_ANY);
		return true;
	}
	if (it->window !=
	    first.window) { /* two CPUs here at once let in a few more than the share */
		it->taken = 0;
		it->window = first.window;
	}
	return __sync_fetch_and_add(&it->taken, 1) < TRACED_OF_ONE;
}

/* Notes a sample, or a wait that has a stack, of a thread that works on a traced request. `task`: the thread. */
static __always_inline void note_traced(struct task_struct *task, u64 stack_id, u64 now, s32 kind,
					u64 count, u64 blocked_ns, u64 runqueue_ns)
{
	u32 tid = task->pid;
	struct trace_context *c;
	struct traced_sample *row;

	c = bpf_map_lookup_elem(&trace_contexts, &tid);
	if (!c || !(c->trace_hi | c->trace_lo) || c->born_ns != task->start_boottime)
		return;
	row = within_traced_share(c->party, bpf_ktime_get_ns()) ?
		      bpf_ringbuf_reserve(&traced, sizeof(*row), 0) :
		      NULL;
	if (!row) {
		count_loss(LOSS_TRACED);
		return;
	}
	row->time_ns = now;
	row->start_ns = start_of(task);
	row->stack_id = stack_id;
	row->trace_hi = c->trace_hi;
	row->trace_lo = c->trace_lo;
	row->span_id = c->span_id;
	row->count = count;
	row->blocked_ns = blocked_ns;
	row->runqueue_ns = runqueue_ns;
	row->tgid = task->tgid;
	row->tid = tid;
	row->reason = kind;
	row->unused = 0;
	bpf_ringbuf_submit(row, BPF_RB_NO_WAKEUP);
}

#endif
