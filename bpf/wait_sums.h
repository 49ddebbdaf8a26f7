/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What becomes of a wait: its thread's row, the weight of its stack, and a single interval if it is long. Include
 * task.h, trace_context.h, wait_reason.h and cpu_use.h before.
 */
#ifndef SONDE_WAIT_SUMS_H
#define SONDE_WAIT_SUMS_H

#include "young_rows.h"

const volatile u64 span_min_ns = 10000000; /* waits at least this long become spans */

SWAPPED_ROWS(waits, struct wait_key, struct wait_value, 32768)
SPARE_ROWS(waits, struct wait_key, struct wait_value, 16384)

/* A wait in progress; counted_ns is 0 while the thread runs. */
struct waiting {
	u64 began_ns;	    /* switch-out */
	u64 counted_ns;	    /* summed up to here; on_switch and the scan replace it atomically */
	u64 wake_ns;	    /* last wake-up since the wait before; 0: none */
	struct cpu_use use; /* of the thread when it began */
	u64 stack_id;
	u64 walk_ns; /* what taking it added to the beginning of the wait */
	struct stack_chance chance;
	u64 start_ns; /* of the process */
	u32 weight;   /* inverse chance of the stack; 0: none taken */
	u32 drawn;    /* as how many it counts if it is short (short_waits.h) */
	s32 reason;
	u32 waker_tgid;
	u32 waker_tid;
	u64 party;
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
} wait_spans SEC(".maps");

/* Puts the layout of the ring's records into the object's BTF. */
const struct wait_span *wait_span_layout __attribute__((unused));

/*
 * The row of a wait for which there is no separate one: that of the same thread without a stack, if there is
 * one, else that of its process, else that of all others.
 */
static __always_inline struct wait_value *coarser_row(struct wait_key *key)
{
	const struct wait_value zero = {};
	const struct wait_key rest = {};
	const u32 first = 0;
	struct wait_value *v = NULL;
	void *rows;

	if (key->stack_id) {
		key->stack_id = 0;
		rows = bpf_map_lookup_elem(&waits, &first);
		v = rows ? bpf_map_lookup_elem(rows, key) : NULL;
		if (v) {
			count_loss(LOSS_STACK_MAP_FULL);
			return v;
		}
	}
	key->tid = 0;
	return spare_row_of(&waits_spare, key, &zero, &rest);
}

/* Rows of one thread are written where it runs, and only seldom by the scan at the same moment, so additions
 * to them are not atomic, which would cost: this is under the run-queue lock. */
#define ADD_WAIT(field, more)                                                                      \
	do {                                                                                       \
		if (is_shared)                                                                     \
			ADD_TO(v->field, more);                                                    \
		else                                                                               \
			v->field += (more);                                                        \
	} while (0)

/* Adds a wait from `from` to `now` to its row, as `times` waits. `ended`: it is over, else it goes on. */
static __always_inline void sum_wait(struct waiting *w, struct task_struct *task, u64 from, u64 now,
				     bool ended, u32 times)
{
	const struct wait_value zero = {};
	u32 tgid = task->tgid, tid = task->pid;
	struct wait_key key = {
		.tgid = tgid,
		.tid = tid,
		.start_ns = w->start_ns,
		.stack_id = w->stack_id,
		.reason = w->reason,
	};
	u64 ready = w->began_ns; /* when it stopped being blocked */
	u64 blocked = 0, runqueue, max_blocked, max_runqueue;
	u64 as_others_blocked, as_others_runqueue; /* of each that it stands for besides */
	struct wait_value *v;
	bool is_shared;

	/*
	 * A thread that blocks is always woken. Where the wake-up is older than the switch-out the
	 * waker was faster than the switch, and the thread was never blocked at all. Where there was
	 * none, on_waking was not run (see end_unseen) and the kernel does not show it: blocked.
	 */
	if (w->reason != WAIT_PREEMPTED && w->reason != WAIT_NEW) {
		if (w->wake_ns >= w->began_ns)
			ready = w->wake_ns;
		else if (!ended || !w->wake_ns)
			ready = now;
	}
	if (ready > now)
		ready = now;
	max_blocked = ready - w->began_ns;
	max_runqueue = now - ready;
	if (ready > from)
		blocked = ready - from;
	runqueue = now - (ready > from ? ready : from);

	v = known_row(&waits, &key);
	if (!v && !may_have_row(w->party, w->start_ns)) {
		key = (struct wait_key){};
		v = rest_row_of(&waits_spare, &key);
	} else if (!v) {
		v = find_row(&waits, &key, &zero);
	}
	if (!v && key.tgid)
		v = coarser_row(&key);
	if (!v)
		return;
	is_shared = !key.tid;
	as_others_blocked = blocked;
	as_others_runqueue = runqueue;
	if (w->weight) {
		/* Waits with a stack are longer by the walk than those without that they stand for. */
		u64 walked = w->began_ns + w->walk_ns;

		if (walked < from)
			walked = from;
		if (walked > now)
			walked = now;
		as_others_blocked = ready > walked ? ready - walked : 0;
		as_others_runqueue = now - (ready > walked ? ready : walked);
		if (trace_requests)
			note_traced(task, w->stack_id, from, w->reason, ended ? w->weight : 0,
				    as_others_blocked * w->weight, as_others_runqueue * w->weight);
		ADD_WAIT(weight_count, ended ? w->weight : 0);
		ADD_WAIT(weight_blocked_ns, as_others_blocked * w->weight);
		ADD_WAIT(weight_runqueue_ns, as_others_runqueue * w->weight);
	}
	ADD_WAIT(count, ended ? times : 0);
	ADD_WAIT(blocked_ns, blocked + as_others_blocked * (times - 1));
	ADD_WAIT(runqueue_ns, runqueue + as_others_runqueue * (times - 1));
	RAISE_TO(v->max_blocked_ns, max_blocked);
	RAISE_TO(v->max_runqueue_ns, max_runqueue);
	if (!ended)
		return;
	v->waker_tgid = w->waker_tgid;
	v->waker_tid = w->waker_tid;
	if (now - w->began_ns >= span_min_ns && tgid) {
		struct wait_span *span = bpf_ringbuf_reserve(&wait_spans, sizeof(*span), 0);

		if (!span) {
			count_loss(LOSS_RING_FULL);
			return;
		}
		span->start_time_ns = w->began_ns;
		span->wake_time_ns = ready;
		span->end_time_ns = now;
		span->start_ns = w->start_ns;
		span->stack_id = w->stack_id;
		span->tgid = tgid;
		span->tid = tid;
		span->reason = w->reason;
		span->waker_tgid = w->waker_tgid;
		span->waker_tid = w->waker_tid;
		span->unused = 0;
		bpf_ringbuf_submit(span, BPF_RB_NO_WAKEUP);
	}
}

#endif
