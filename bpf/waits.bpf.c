// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Off-CPU: what threads wait for. A wait begins when a thread leaves its CPU and ends when it gets
 * one back; the wake-up in between divides it in two:
 *
 *     switch-out ........ blocked ........ wake-up ... run queue ... switch-in
 *
 * A thread that was preempted has no blocked part. The stack is taken at switch-out, where it is cheap
 * and the address space is still there, but the duration is not known yet; so it is sampled
 * (stack_weight), and the wait carries the inverse of its chance as weight.
 *
 * Everything in on_switch runs under the run-queue lock: it is kept short.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#include "stack.h"
#include "task.h"
#include "host_types.h"
#include "storage_share.h"
#include "chosen.h"
#include "trace_context.h"
#include "short_waits.h"
#include "wait_reason.h"
#include "cpu_use.h"
#include "wait_sums.h"

const volatile bool switch_has_state = false; /* sched_switch has the state as an argument (5.18) */
const volatile bool measure_switch = false;   /* the time of each on_switch goes into unwind_cost */

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct waiting);
} threads SEC(".maps");

/* [0] for on_switch, which no other walk interrupts on its CPU; [1] for the scan, of which one runs at a time. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, u32);
	__type(value, struct unwind_walk);
} scratch SEC(".maps");

/* One in this many of the stacks that are due is taken (0, 1: all): user space asks for fewer where new ones
 * come faster than it can find their names, and each then stands for more. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u32);
} stack_divisor SEC(".maps");

/* The weight of a stack that is due, 0 to take none. */
static __always_inline u32 thinned(u32 weight)
{
	const u32 first = 0;
	u32 *divisor = bpf_map_lookup_elem(&stack_divisor, &first);

	if (!divisor || *divisor <= 1)
		return weight;
	return bpf_get_prandom_u32() % *divisor ? 0 : weight * *divisor;
}

/* Sets a wait that proved long from what the thread's line holds, as if it had been drawn. */
static __always_inline void take_in(struct waiting *w, struct task_struct *task,
				    const struct wait_line *line)
{
	w->start_ns = start_of(task);
	w->began_ns = line->began_ns;
	w->use.switches = 0; /* not known */
	if (line->wake_ns)
		w->wake_ns = line->wake_ns;
	w->reason = reason_of(task, line->task_state, line->preempted);
	w->waker_tgid = line->waker_tgid;
	w->waker_tid = line->waker_tid;
	w->stack_id = 0;
	w->weight = 0;
	w->walk_ns = 0;
	w->drawn = 1;
}

/* Sums a wait that is over, from `from` to `now`; the next one has not been woken yet. */
static __noinline void sum_ended(struct waiting *w, struct task_struct *task, u64 from, u64 now)
{
	if (now < from) /* the scan summed it up after we looked at the clock */
		now = from;
	sum_wait(w, task, from, now, true,
		 w->drawn > 1 && !is_long(now - w->began_ns, now) ? w->drawn : 1);
	w->wake_ns = 0;
}

/*
 * A thread leaves its CPU whose last wait, summed up to `from`, did not end: the kernel did not run on_switch
 * when it got the CPU. It skips programs that run on this CPU already, and some kernels run none while a task
 * of theirs that they shield is the current one. What the thread ran since is the time that the wait is over.
 * Where it had the CPU more than once since, that is not known: the wait ends with its wake-up.
 */
static __always_inline void end_unseen(struct waiting *w, struct task_struct *task, u64 from,
				       u64 now)
{
	const struct cpu_use use = use_of(task);
	u64 end = w->wake_ns;

	if (w->use.switches && use.switches - w->use.switches == 1) {
		end = now - (use.run_ns - w->use.run_ns);
		if (!w->wake_ns)
			w->wake_ns = end - (use.ready_ns - w->use.ready_ns);
	}
	if (end < w->began_ns || end > now) {
		count_loss(LOSS_UNSEEN_SWITCH);
		w->wake_ns = 0;
		return;
	}
	sum_ended(w, task, from, end);
}

static __always_inline void begin_wait(void *ctx, struct task_struct *prev, u32 state,
				       bool preempted, u64 now)
{
	const u32 slot = 0;
	struct wait_line *line = line_of(prev->pid);
	enum closeness closeness;
	struct waiting *w;
	struct unwind_walk *walk;
	u32 times;
	u64 from;

	if (!preempted && (state & TASK_ENDED))
		return;
	if (line && line->tid == prev->pid && line->state == LINE_NOTED && take_line(line) &&
	    is_long(now - line->began_ns, now))
		count_loss(LOSS_UNSEEN_SWITCH); /* it may have been long; see end_unseen */
	times = drawn(line, prev->pid, state, preempted, now);
	if (!times)
		return;
	w = bpf_task_storage_get(&threads, prev, 0, 0);
	if (!w) {
		count_loss(LOSS_TASK_STORAGE);
		return;
	}
	closeness = closeness_of(prev->tgid);
	if (closeness == NOT_CHOSEN) {
		w->start_ns = 0; /* once its process is chosen, the scan finds the thread waiting */
		return;
	}
	from = w->counted_ns;
	if (from)
		end_unseen(w, prev, from, now);
	w->use = use_of(prev);
	if (!w->start_ns)
		w->start_ns = start_of(prev);
	w->reason = reason_of(prev, state, preempted);
	w->drawn = times;
	if (w->reason == WAIT_PREEMPTED) /* nobody wakes a thread that is ready */
		w->waker_tgid = w->waker_tid = 0;
	w->stack_id = 0;
	w->weight = 0;
	if (closeness == WITH_STACKS)
		w->weight = stack_weight(&w->chance, w->reason, now);
	if (w->weight)
		w->weight = weight_of_stack(thinned(w->weight), times, now);
	walk = w->weight ? bpf_map_lookup_elem(&scratch, &slot) : NULL;
	w->walk_ns = 0;
	if (walk) {
		w->stack_id =
			stack_take(ctx, walk, seed_of(prev, w->start_ns), has_user_frames(prev), 0);
		w->walk_ns = bpf_ktime_get_ns() - now;
		charge_walk(w->walk_ns, now);
	}
	w->began_ns = now;
	__sync_lock_test_and_set(&w->counted_ns, now);
}

/* `line`: noted_line_of the thread. */
static __always_inline void end_wait(struct task_struct *next, struct wait_line *line, u64 now)
{
	struct waiting *w;
	u64 from;

	if (line && !take_line(line))
		line = NULL; /* the scan was faster */
	if (line && !is_long(now - line->began_ns, now))
		return;
	w = bpf_task_storage_get(&threads, next, 0, 0);
	if (!w)
		return;
	if (line) {
		take_in(w, next, line);
		from = w->began_ns;
	} else {
		from = __sync_lock_test_and_set(&w->counted_ns, 0);
		if (!from)
			return;
	}
	if (!w->wake_ns) /* on_waking was not run: see end_unseen */
		w->wake_ns = ready_since(next, now);
	sum_ended(w, next, from, now);
}

SEC("tp_btf/sched_switch")
int on_switch(u64 *ctx)
{
	bool preempted = ctx[0];
	struct task_struct *prev = (void *)ctx[1];
	struct task_struct *next = (void *)ctx[2];
	u64 now = bpf_ktime_get_ns();
	struct wait_line *line;

	if (prev->pid && (drawn_lately(prev->pid, now) || watched(prev->tgid))) {
		u32 state = switch_has_state ? (u32)ctx[3] : state_of(prev);

		begin_wait(ctx, prev, state, preempted, now);
	}
	if (next->pid) {
		line = noted_line_of(next->pid);
		if (line || watched(next->tgid))
			end_wait(next, line, now);
	}
	if (measure_switch)
		count_cost(now);
	return 0;
}

SEC("tp_btf/sched_waking")
int BPF_PROG(on_waking, struct task_struct *task)
{
	struct wait_line *line;
	struct waiting *w;
	u64 waker, now;

	line = noted_line_of(task->pid);
	if (line) {
		now = bpf_ktime_get_ns();
		line->wake_ns = now;
		if (now - line->began_ns >= long_wait_ns &&
		    !in_interrupt(bpf_get_current_task_btf())) {
			waker = bpf_get_current_pid_tgid();
			line->waker_tgid = waker >> 32;
			line->waker_tid = (u32)waker;
		}
		return 0;
	}
	w = watched(task->tgid) ? bpf_task_storage_get(&threads, task, 0, 0) : NULL;
	if (!w)
		return 0;
	waker = in_interrupt(bpf_get_current_task_btf()) ? 0 : bpf_get_current_pid_tgid();
	w->wake_ns = bpf_ktime_get_ns();
	w->waker_tgid = waker >> 32;
	w->waker_tid = (u32)waker;
	return 0;
}

/*
 * A thread's storage is made when it is forked or by the scan, never in the scheduler's own hooks: up to
 * 6.3 that allocates memory, which under the run-queue lock may wake the kernel's reclaim and hang.
 */
SEC("tp_btf/sched_process_fork")
int BPF_PROG(on_born, struct task_struct *parent, struct task_struct *child)
{
	struct waiting *w;
	u64 party;

	if (!watched(parent->tgid))
		return 0;
	party = party_of(child);
	if (!may_have_storage(party)) {
		count_loss(LOSS_TASK_STORAGE);
		return 0;
	}
	/* There may be no memory at one moment and some at the next. */
	for (int tries = 0; tries < 4; tries++) {
		w = bpf_task_storage_get(&threads, child, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
		if (w) {
			w->party = party;
			count_storage(party);
			return 0;
		}
	}
	count_loss(LOSS_TASK_STORAGE);
	return 0;
}

SEC("tp_btf/sched_wakeup_new")
int BPF_PROG(on_new, struct task_struct *task)
{
	struct waiting *w;

	if (!watched(task->tgid) || closeness_of(task->tgid) == NOT_CHOSEN)
		return 0;
	w = bpf_task_storage_get(&threads, task, 0, 0);
	if (!w) {
		count_loss(LOSS_TASK_STORAGE);
		return 0;
	}
	w->start_ns = start_of(task);
	w->drawn = 1;
	w->reason = WAIT_NEW;
	w->began_ns = bpf_ktime_get_ns();
	__sync_lock_test_and_set(&w->counted_ns, w->began_ns);
	return 0;
}

/*
 * Run by user space over all tasks at the start and before each drain: threads that wait already are
 * counted from now on, and the waits in progress are summed up to now, so that what never ends (a hang,
 * a server's accept) is seen while it lasts.
 */
SEC("iter/task")
int on_scan(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	const u32 slot = 1;
	enum closeness closeness;
	struct unwind_walk *walk;
	struct sonde_stack *s;
	struct wait_line *line;
	struct waiting *w;
	u64 now, from;
	long n;

	w = task ? bpf_task_storage_get(&threads, task, 0, 0) : NULL;
	RECOUNT(ctx, w, !task);
	if (!task || !task->pid || !watched(task->tgid))
		return 0;
	if (!w)
		w = MADE_TASK_STORAGE(threads, task);
	if (!w) {
		count_loss(LOSS_TASK_STORAGE);
		return 0;
	}
	/* Kernel threads sleep until there is work: their long waits mean nothing. */
	if (task->flags & PF_KTHREAD || task->on_cpu)
		return 0;
	closeness = closeness_of(task->tgid);
	if (closeness == NOT_CHOSEN)
		return 0;
	now = bpf_ktime_get_ns();
	from = w->counted_ns;
	if (from) {
		struct waiting seen = *w; /* after the exchange the thread may begin another */

		/* What may prove short counts once it is over. */
		if (now > from && now > seen.began_ns &&
		    (seen.drawn <= 1 || now - seen.began_ns >= longest_short_wait_ns) &&
		    __sync_val_compare_and_swap(&w->counted_ns, from, now) == from)
			sum_wait(&seen, task, from, now, false, 1);
		return 0;
	}
	line = noted_line_of(task->pid);
	if (line && now - line->began_ns >= longest_short_wait_ns && take_line(line)) {
		take_in(w, task, line);
		__sync_val_compare_and_swap(&w->counted_ns, 0, w->began_ns);
		return 0; /* summed from the next scan on, or by its end */
	}
	if (w->start_ns) /* seen before: it was running just now, or its wait is not drawn */
		return 0;
	w->start_ns = start_of(task);
	w->drawn = 1;
	w->reason = reason_of(task, state_of(task), false);
	w->weight = 0;
	w->stack_id = 0;
	w->walk_ns = 0; /* the scanning thread walks: the wait is no longer for it */
	walk = closeness == WITH_STACKS ? bpf_map_lookup_elem(&scratch, &slot) : NULL;
	if (walk) {
		s = &walk->pieces[0];
		/* Another task's user stack cannot be read from here; its kernel stack can. */
		n = bpf_get_task_stack(task, s->kernel, sizeof(s->kernel), 0);
		s->kernel_len = n > 0 ? (u32)n / sizeof(u64) : 0;
		s->user_len = 0;
		s->next = 0;
		s->stop = STOP_ENTRY;
		s->is_tail = 0;
		w->weight = 1;
		w->stack_id = stack_keep(s, seed_of(task, w->start_ns));
	}
	w->began_ns = now;
	__sync_val_compare_and_swap(&w->counted_ns, 0, now);
	return 0;
}

/*
 * Run over all tasks once on_switch is detached: a wait in progress would otherwise be taken to last until it
 * is attached again.
 */
SEC("iter/task")
int on_forget(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct wait_line *line;
	struct waiting *w;

	if (!task)
		return 0;
	line = noted_line_of(task->pid);
	if (line)
		take_line(line);
	w = bpf_task_storage_get(&threads, task, 0, 0);
	if (w) {
		__sync_lock_test_and_set(&w->counted_ns, 0);
		w->start_ns = 0;
	}
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
