// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Run queues: how long they are, read by a timer up to 100 times a second (a look), and how long threads
 * wait in each before they get the CPU.
 *
 * The kernel itself notes when a thread was queued (sched_info), and its run queue has a clock that was
 * updated for this very switch: the delay is the difference, as the kernel sums it. on_switch runs under
 * the run-queue lock: it reads two words and adds to this CPU's own counts. It also keeps the address of
 * its CPU's run queue for the timer: not every kernel has a symbol for it.
 *
 * The memory for a timer can be refused, for seconds. Until there is some, the sampling clocks of the CPUs
 * look instead (on_tick), which cannot be slowed down while the machine is idle.
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

#define CLOCK_MONOTONIC 1
#define ENOMEM 12
#define EBUSY 16
#define MAX_CPUS 1024

const volatile u32 cpus = 1;		    /* possible CPUs, of the kernel's list */
const volatile u64 busy_gap_ns = 10000000;  /* between two looks while the machine works */
const volatile u64 idle_gap_ns = 100000000; /* and while it does not */

/*
 * How busy the machine is: an exponential moving average of the looks that found a thread running, of
 * which each weighs 1/16; BUSY_ALL where all did. From BUSY_ENOUGH on it is active: after 7 looks (0.07 s)
 * that all did, or where four in ten do.
 */
#define BUSY_ALL 256
#define BUSY_ENOUGH 96

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct cpu_delays);
} delays SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 64 * 1024);
} pulses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CPUS);
	__type(key, u32);
	__type(value, struct cpu_queue);
} queues SEC(".maps");

/* Has something to read as soon as a machine that was idle is active: that wakes user space. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} stirs SEC(".maps");

/* What is kept from one look to the next. */
struct watch {
	u64 time_ns;  /* of the last look */
	u64 switches; /* of all CPUs, then */
	u64 level;    /* how busy, up to BUSY_ALL */
	u64 timed;    /* 1: a timer looks */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct watch);
} watches SEC(".maps");

struct clock {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct clock);
} clocks SEC(".maps");

/*
 * [0] what looking has cost, in ns; [1] how many looks there were. How often a timer could not be made:
 * [2] because there was no memory, [3] for another reason; [4] how often it could not be started.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 5);
	__type(key, u32);
	__type(value, u64);
} spent SEC(".maps");

/* What user space wants: [0] 1: looks, 0: none; [1] 1: to be woken, once, when the machine is active. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, u32);
	__type(value, u32);
} wanted SEC(".maps");

/* Puts the layout of the ring's records into the object's BTF. */
const struct pulse *pulse_layout __attribute__((unused));

/* Adds the run queue of one CPU to a look. */
static long look_at_cpu(u32 cpu, void *context)
{
	struct pulse *p = context;
	struct cpu_queue *q = bpf_map_lookup_elem(&queues, &cpu);
	struct rq *rq;
	u32 running;
	u64 switches;

	if (!q || !q->at)
		return 0; /* not every possible CPU is there */
	rq = (struct rq *)q->at;
	running = BPF_CORE_READ(rq, nr_running);
	switches = BPF_CORE_READ(rq, nr_switches);
	p->running += running;
	p->busy += running > 0;
	if (running > p->longest)
		p->longest = running;
	p->io_waiting += BPF_CORE_READ(rq, nr_iowait.counter);
	p->switches += switches;
	q->looks++;
	q->running += running;
	q->busy += running > 0;
	if (running > q->longest)
		q->longest = running;
	q->switches = switches;
	return 0;
}

/* Adds to an entry of `spent`. */
static __always_inline void count(u32 which, u64 more)
{
	u64 *n = bpf_map_lookup_elem(&spent, &which);

	if (n)
		*n += more;
}

static __always_inline void mark_active(struct watch *w, const struct pulse *p)
{
	const u32 second = 1;
	u32 *asked = bpf_map_lookup_elem(&wanted, &second);

	w->level -= w->level / 16;
	if (p->busy)
		w->level += BUSY_ALL / 16;
	if (!asked || !*asked || w->level < BUSY_ENOUGH)
		return;
	*asked = 0;
	if (bpf_ringbuf_output(&stirs, (void *)p, sizeof(*p), BPF_RB_FORCE_WAKEUP))
		count_loss(LOSS_RING_FULL);
}

/* Looks once. Returns the time until the next look, in ns: longer where the machine is idle, because a look
 * wakes an idle CPU. */
static __always_inline u64 look(struct watch *w)
{
	struct pulse p = {.time_ns = bpf_ktime_get_ns()};
	bool is_idle;

	bpf_loop(cpus, look_at_cpu, &p, 0);
	if (bpf_ringbuf_output(&pulses, &p, sizeof(p), BPF_RB_NO_WAKEUP))
		count_loss(LOSS_RING_FULL);
	mark_active(w, &p);
	is_idle = !p.busy && p.switches - w->switches <= 2 * idle_gap_ns / busy_gap_ns;
	w->time_ns = p.time_ns;
	w->switches = p.switches;
	count(0, bpf_ktime_get_ns() - p.time_ns);
	count(1, 1);
	return is_idle ? idle_gap_ns : busy_gap_ns;
}

static __always_inline bool is_wanted(void)
{
	const u32 first = 0;
	u32 *go_on = bpf_map_lookup_elem(&wanted, &first);

	return go_on && *go_on;
}

static int on_timer(void *map, u32 *key, struct clock *clock)
{
	const u32 first = 0;
	struct watch *w = bpf_map_lookup_elem(&watches, &first);

	if (!w)
		return 0;
	if (!is_wanted() || bpf_timer_start(&clock->timer, look(w), 0))
		w->timed = 0; /* until user space runs on_begin again */
	return 0;
}

SEC("perf_event")
int on_tick(void *ctx)
{
	const u32 first = 0;
	struct watch *w = bpf_map_lookup_elem(&watches, &first);
	u64 last;

	if (!w || w->timed || !is_wanted())
		return 0;
	last = *(volatile u64 *)&w->time_ns; /* before the clock: another CPU may write it now */
	/* Each CPU has a sampling clock; the first to come looks. */
	if (bpf_ktime_get_ns() - last >= busy_gap_ns - busy_gap_ns / 4)
		look(w);
	return 0;
}

/*
 * Starts the timer. An iterator only because user space can run one whenever it likes: the task does not
 * matter. There may be no memory for a timer at that moment; then it is tried again with the next task.
 */
SEC("iter/task")
int on_begin(struct bpf_iter__task *ctx)
{
	const u32 first = 0;
	struct clock *clock = bpf_map_lookup_elem(&clocks, &first);
	struct watch *w = bpf_map_lookup_elem(&watches, &first);
	long refused;

	if (!clock || !w || w->timed)
		return 0;
	w->timed = 1;
	refused = bpf_timer_init(&clock->timer, &clocks, CLOCK_MONOTONIC);
	if (refused && refused != -EBUSY) /* -EBUSY: it was made before */
		count(refused == -ENOMEM ? 2 : 3, 1);
	bpf_timer_set_callback(&clock->timer, on_timer);
	if (bpf_timer_start(&clock->timer, busy_gap_ns, 0)) {
		w->timed = 0;
		count(4, 1);
	}
	return 0;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	struct task_struct___counters *t = (void *)next;
	u64 queued = t->sched_info.last_queued, ns, bits;
	const u32 first = 0;
	struct cpu_delays *d;
	struct cpu_queue *q;
	struct rq *rq;
	u32 slot = 0, cpu;

	if (!queued || !next->pid)
		return 0;
	rq = t->se.cfs_rq->rq; /* of the CPU that the task is on, whatever its scheduling class */
	ns = rq->clock - queued;
	if ((s64)ns < 0)
		return 0;
	d = bpf_map_lookup_elem(&delays, &first);
	if (!d)
		return 0;
	if (!d->count) {
		cpu = bpf_get_smp_processor_id();
		q = bpf_map_lookup_elem(&queues, &cpu);
		if (q)
			q->at = (u64)rq;
	}
	d->count++;
	d->ns += ns;
	if (ns > d->max_ns)
		d->max_ns = ns;
	bits = ns; /* slot: how many bits it takes */
	if (bits >> 16)
		slot += 16, bits >>= 16;
	if (bits >> 8)
		slot += 8, bits >>= 8;
	if (bits >> 4)
		slot += 4, bits >>= 4;
	if (bits >> 2)
		slot += 2, bits >>= 2;
	if (bits >> 1)
		slot += 1, bits >>= 1;
	slot += bits ? 1 : 0;
	if (slot >= SONDE_DELAYS)
		slot = SONDE_DELAYS - 1;
	d->delays[slot]++;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
