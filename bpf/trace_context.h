/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Which traced request a thread works on: known by traces.bpf.c, looked up where samples and waits are
 * counted. The maps are those of unwind.bpf.c.
 */
#ifndef SONDE_TRACE_CONTEXT_H
#define SONDE_TRACE_CONTEXT_H

#define SHARES traced_shares
#include "share.h"

const volatile bool trace_requests = false;

/*
 * Of a thread that has requests to answer. Other CPUs end requests meanwhile, and an entry that is taken away
 * is at once another thread's: so whose it is and how many requests it has are one word, replaced only where
 * it is as it was read, and the rest never changes.
 */
struct trace_context {
	u64 state;    /* CONTEXT_OF the thread, CONTEXT_SEVERAL, and how many requests it has */
	u64 trace_hi; /* of the first of these; 0 and 0: not traced */
	u64 trace_lo;
	u64 span_id; /* of the caller's span, as in the header */
	u64 party;   /* whose the thread is (party.h); 0: the machine's root */
};

#define CONTEXT_OF(born_ns) ((u64)(born_ns) << 16) /* another thread may get its number */
#define CONTEXT_SEVERAL 0x8000u /* it had several requests at once, since it had none */
#define CONTEXT_REQUESTS 0x7fffu
/* Requests that are not answered, of all threads. Each context has one at least. */
#define MOST_REQUESTS 8192

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MOST_REQUESTS);
	__type(key, u32);
	__type(value, struct trace_context);
} trace_contexts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 512 * 1024);
} traced SEC(".maps");

#define TRACED_OF_ONE                                                                              \
	512 /* samples and waits of a party in a second: trace ids are everybody's to choose */

/* Notes a sample, or a wait that has a stack, of a thread that works on a traced request. `task`: the thread. */
static __always_inline void note_traced(struct task_struct *task, u64 stack_id, u64 now, s32 kind,
					u64 count, u64 blocked_ns, u64 runqueue_ns)
{
	u32 tid = task->pid;
	u64 state = CONTEXT_OF(task->start_boottime) | 1; /* a request, and no other since */
	struct trace_context *c, request;
	struct traced_sample *row;

	c = bpf_map_lookup_elem(&trace_contexts, &tid);
	if (!c || !(c->trace_hi | c->trace_lo) || c->state != state)
		return;
	request = *c;
	barrier();
	if (*(volatile u64 *)&c->state != state)
		return; /* answered just now, and the entry perhaps another's */
	row = within_share(request.party, 0, TRACED_OF_ONE) ?
		      bpf_ringbuf_reserve(&traced, sizeof(*row), 0) :
		      NULL;
	if (!row) {
		count_loss(LOSS_TRACED);
		return;
	}
	row->time_ns = now;
	row->start_ns = start_of(task);
	row->stack_id = stack_id;
	row->trace_hi = request.trace_hi;
	row->trace_lo = request.trace_lo;
	row->span_id = request.span_id;
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
