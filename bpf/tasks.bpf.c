// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * What processes use, and whose they are.
 *
 * The kernel counts for every task already: time on a CPU, time ready without one, switches,
 * migrations, faults, bytes read and written. A scan of all tasks adds what has come since the scan
 * before; when a thread ends, what is left of it is added. So the sums are the kernel's own,
 * and a process that lives 50 ms is in them. Nothing here runs on a switch or on a fault.
 *
 * Whose a process is (control groups, parent, user) is noted when it executes a program, when it is moved
 * to another control group and when it ends, because afterwards /proc knows nothing of it.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#define SONDE_MAX_STACKS 1 /* takes none: stack.h is here for count_loss */
#include "stack.h"
#include "task.h"
#include "host_types.h"
#include "party.h"
#include "young_rows.h"
#include "storage_share.h"

SWAPPED_ROWS(usage, struct usage_key, struct usage_value, 16384)
SPARE_ROWS(usage, struct usage_key, struct usage_value, 1) /* the overflow row: key all 0 */

/*
 * What has been counted of a thread so far. Each value is replaced atomically, by the scan or at the thread's
 * end, and only by a larger one: of two that read the kernel's counter, the one that read it first may come
 * last.
 */
struct counted {
	u64 cpu_ns;
	u64 runqueue_ns;
	u64 runs;
	u64 voluntary;
	u64 involuntary;
	u64 migrations;
	u64 minor_faults;
	u64 major_faults;
	u64 read_bytes;
	u64 written_bytes;
	u64 reclaim_from_ns; /* 0: not reclaiming */
	u64 party;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct counted);
} threads SEC(".maps");

/* When the first scan began, CLOCK_BOOTTIME. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
} first_scan_ns SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
} process_notes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 128 * 1024);
} cgroup_notes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
} step_notes SEC(".maps");

enum shared { PROCESS_NOTES, CGROUP_NOTES, STEP_NOTES, ROWS }; /* `what` of within_share */
#define EVERYBODY (~0ULL) /* stands for all parties; no party has this number */

/* New rows of `usage` in a window: of all, and beyond these of one party. */
const volatile u64 free_rows = 12288;
const volatile u64 most_rows_of_one_party = 1024;

/* Notes of one party in a window (share.h); more only while the ring is less than half full (but for
 * step_notes, which have no more). */
#define PROCESS_NOTES_OF_ONE 256
#define CGROUP_NOTES_OF_ONE 64
#define STEP_NOTES_OF_ONE 4

/* Puts the layouts of the rings' records into the object's BTF. */
const struct step_note *step_note_layout __attribute__((unused));
const struct process_note *process_note_layout __attribute__((unused));
const struct cgroup_note *cgroup_note_layout __attribute__((unused));

/* Whether there is room for a new row of a process of `party`. Global, so that the verifier follows it once. */
__weak __noinline int may_begin_row(u64 party, u64 start_ns)
{
	if (!may_have_row(party, start_ns))
		return 0;
	return filter_targets || within_share(EVERYBODY, ROWS, free_rows) ||
	       within_share(party, ROWS, most_rows_of_one_party);
}

static __always_inline struct usage_value *usage_of(struct task_struct *task, u64 party)
{
	const struct usage_value zero = {};
	const struct usage_key key = {.tgid = task->tgid, .start_ns = start_of(task)}, rest = {};
	struct usage_value *v = known_row(&usage, &key);

	if (!v && may_begin_row(party, key.start_ns))
		v = find_row(&usage, &key, &zero);
	return v ?: rest_row_of(&usage_spare, &rest);
}

/* Sets a counter of `c` to its value now, and that of `added` to what it grew by. */
#define TAKE(field, now)                                                                           \
	do {                                                                                       \
		u64 new_ = (now), old_ = c->field;                                                 \
		if (new_ > old_ && __sync_val_compare_and_swap(&c->field, old_, new_) == old_) {   \
			added.field = new_ - old_;                                                 \
			any |= added.field;                                                        \
		}                                                                                  \
	} while (0)

#define ADD(field) ADD_TO(v->field, added.field)

/* Adds what the kernel counted of a task beyond `c`. `count` false: only remembers it. */
static __always_inline void take(struct task_struct *task, struct counted *c, bool count)
{
	struct task_struct___counters *t = (void *)task;
	struct counted added = {};
	struct usage_value *v;
	u64 any = 0;

	TAKE(cpu_ns, t->se.sum_exec_runtime);
	TAKE(runqueue_ns, t->sched_info.run_delay);
	TAKE(runs, t->sched_info.pcount);
	TAKE(voluntary, t->nvcsw);
	TAKE(involuntary, t->nivcsw);
	TAKE(migrations, t->se.nr_migrations);
	TAKE(minor_faults, t->min_flt);
	TAKE(major_faults, t->maj_flt);
	TAKE(read_bytes, t->ioac.read_bytes);
	TAKE(written_bytes, t->ioac.write_bytes);
	if (!count || !any)
		return;
	v = usage_of(task, c->party);
	if (!v)
		return;
	ADD(cpu_ns);
	ADD(runqueue_ns);
	ADD(runs);
	ADD(voluntary);
	ADD(involuntary);
	ADD(migrations);
	ADD(minor_faults);
	ADD(major_faults);
	ADD(read_bytes);
	ADD(written_bytes);
}

/* Whether a thread is older than what is reported: the first scan found it, with or without room for it. */
static __always_inline bool began_before(struct task_struct *task)
{
	const u32 first = 0;
	u64 *since_ns = bpf_map_lookup_elem(&first_scan_ns, &first);

	return since_ns && task->start_boottime < *since_ns;
}

/* New storage of a thread that has none. NULL: there is no room for it. */
static __always_inline struct counted *first_counted(struct task_struct *task)
{
	struct counted *c = MADE_TASK_STORAGE(threads, task);

	if (!c)
		count_loss(LOSS_TASK_STORAGE);
	else if (began_before(task))
		take(task, c, false);
	return c;
}

/* Before each drain: over every task there is. */
SEC("iter/task")
int on_scan(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct counted *c = task ? bpf_task_storage_get(&threads, task, 0, 0) : NULL;

	RECOUNT(ctx, c, !task);
	if (!task || !task->pid || !watched(task->tgid))
		return 0;
	if (!c)
		c = first_counted(task);
	if (c)
		take(task, c, true);
	return 0;
}

/* Once at the start: what was counted before it is not reported. */
SEC("iter/task")
int on_first_scan(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct counted *c = task ? bpf_task_storage_get(&threads, task, 0, 0) : NULL;
	const u32 first = 0;
	u64 *since_ns = bpf_map_lookup_elem(&first_scan_ns, &first);

	if (since_ns && !ctx->meta->seq_num)
		*since_ns = bpf_ktime_get_boot_ns();
	RECOUNT(ctx, c, !task);
	if (!task || !task->pid)
		return 0;
	if (!c)
		c = first_counted(task);
	if (c)
		take(task, c, false);
	return 0;
}

static __always_inline void note_cgroup(struct process_note *n, u32 slot, struct cgroup *cgroup)
{
	if (!cgroup)
		return;
	n->cgroup[slot] = BPF_CORE_READ(cgroup, kn, id);
	n->hierarchy[slot] = BPF_CORE_READ(cgroup, root, hierarchy_id);
}

#define NOTE_CONTROLLER(slot, controller)                                                          \
	do {                                                                                       \
		if (bpf_core_enum_value_exists(enum cgroup_subsys_id___here,                       \
					       controller##_cgrp_id___here)) {                     \
			u32 id_ = bpf_core_enum_value(enum cgroup_subsys_id___here,                \
						      controller##_cgrp_id___here);                \
			struct cgroup_subsys_state *css_ = NULL;                                   \
			if (id_ < 16) {                                                            \
				bpf_core_read(&css_, sizeof(css_), &set->subsys[id_]);             \
				note_cgroup(n, slot, BPF_CORE_READ(css_, cgroup));                 \
			}                                                                          \
		}                                                                                  \
	} while (0)

/* Notes whose `task` is now. Control groups of version 2 have one hierarchy; of version 1 those of three
 * controllers are read, which container runtimes and Slurm use. */
static __always_inline void note(struct task_struct *task, u32 kind)
{
	struct task_struct___owner *leader = (void *)BPF_CORE_READ(task, group_leader);
	struct process_note *n = NULL;
	struct css_set *set;
	struct pid *pid;
	u32 level;

	if (WITHIN_SHARE_OF_RING(process_notes, task, PROCESS_NOTES, PROCESS_NOTES_OF_ONE))
		n = bpf_ringbuf_reserve(&process_notes, sizeof(*n), 0);
	if (!n) {
		count_loss(LOSS_NOTES_FULL);
		return;
	}
	__builtin_memset(n, 0, sizeof(*n));
	n->time_ns = bpf_ktime_get_ns();
	n->start_ns = start_of(task);
	n->kind = kind;
	n->tgid = BPF_CORE_READ(leader, tgid);
	n->parent_tgid = BPF_CORE_READ(leader, real_parent, tgid);
	n->uid = BPF_CORE_READ(leader, real_cred, uid.val);
	pid = BPF_CORE_READ(leader, thread_pid);
	level = BPF_CORE_READ(pid, level);
	bpf_core_read(&n->inner_pid, sizeof(u32), &pid->numbers[0].nr);
	if (level) {
		/* pid->numbers[level]: its size is that of the running kernel. */
		u64 at = (u64)__builtin_preserve_access_index(&pid->numbers[0]) +
			 level * bpf_core_type_size(struct upid) +
			 bpf_core_field_offset(struct upid, nr);

		bpf_probe_read_kernel(&n->inner_pid, sizeof(u32), (void *)at);
	}
	set = BPF_CORE_READ(leader, cgroups);
	note_cgroup(n, 0, BPF_CORE_READ(set, dfl_cgrp));
	NOTE_CONTROLLER(1, memory);
	NOTE_CONTROLLER(2, freezer);
	NOTE_CONTROLLER(3, pids);
	/* Read at the next drain, not at once: waking user space costs more than the note. */
	bpf_ringbuf_submit(n, BPF_RB_NO_WAKEUP);
}

/*
 * Where Slurm uses no control groups, the environment of what slurmstepd starts is all that identifies the
 * step, and both may be gone before user space could look at it. Every user may name a process
 * slurmstepd, so only one that root runs is believed.
 */
static __always_inline void note_slurm_step(struct task_struct *task)
{
	const char daemon[] = "slurmstepd";
	struct task_struct___owner *t = (void *)task, *parent;
	char comm[16] = {};
	struct step_note *n;
	u64 start, end, length;

	parent = (void *)BPF_CORE_READ(t, real_parent);
	bpf_core_read(comm, sizeof(comm), &parent->comm);
	for (u32 i = 0; i < sizeof(daemon); i++)
		if (comm[i] != daemon[i])
			return;
	if (BPF_CORE_READ(parent, real_cred, uid.val))
		return;
	/* Root of a container can start such a daemon, too: it is not the machine's. */
	if (outermost_pid_namespace(BPF_CORE_READ(parent, group_leader, thread_pid)))
		return;
	n = within_share(party_of((void *)parent), STEP_NOTES, STEP_NOTES_OF_ONE) ?
		    bpf_ringbuf_reserve(&step_notes, sizeof(*n), 0) :
		    NULL;
	if (!n) {
		count_loss(LOSS_NOTES_FULL);
		return;
	}
	n->tgid = task->tgid;
	n->start_ns = start_of(task);
	start = BPF_CORE_READ(task, mm, env_start);
	end = BPF_CORE_READ(task, mm, env_end);
	length = end - start;
	if (length > sizeof(n->environment)) {
		length = sizeof(n->environment); /* what Slurm adds comes last */
		start = end - length;
	}

	asm volatile("" : "+r"(length)); /* so that clang does not drop the check below as known */
	if (length > sizeof(n->environment) ||
	    bpf_probe_read_user(n->environment, length, (void *)start))
		length = 0;
	n->length = length;
	bpf_ringbuf_submit(n, BPF_RB_NO_WAKEUP);
}

SEC("tp_btf/sched_process_exec")
int BPF_PROG(on_exec, struct task_struct *task)
{
	if (watched(task->tgid)) {
		note(task, NOTE_EXEC);
		note_slurm_step(task);
	}
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(on_exit, struct task_struct *task)
{
	struct counted none = {}, *c;

	if (!watched(task->tgid))
		return 0;
	/* NULL: no scan has seen it, or had room for it. Where it began after the first one, nothing of it is
	 * counted yet. */
	c = bpf_task_storage_get(&threads, task, 0, 0);
	if (!c)
		none.party = party_of(task);
	if (c || !began_before(task))
		take(task, c ?: &none, true);
	else
		count_loss(LOSS_TASK_STORAGE);
	if (!BPF_CORE_READ(task, signal, live.counter)) /* the last of its threads */
		note(task, NOTE_EXIT);
	return 0;
}

SEC("tp_btf/cgroup_attach_task")
int BPF_PROG(on_cgroup_attach, struct cgroup *to, const char *path, struct task_struct *task)
{
	if (watched(task->tgid))
		note(task, NOTE_MOVED);
	return 0;
}

/* A container's control group may be gone before user space could look at it. */
SEC("tp_btf/cgroup_mkdir")
int BPF_PROG(on_cgroup_mkdir, struct cgroup *made, const char *path)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task_btf();
	struct cgroup_note *n = NULL;
	long length;

	if (WITHIN_SHARE_OF_RING(cgroup_notes, task, CGROUP_NOTES, CGROUP_NOTES_OF_ONE))
		n = bpf_ringbuf_reserve(&cgroup_notes, sizeof(*n), 0);
	if (!n) {
		count_loss(LOSS_NOTES_FULL);
		return 0;
	}
	n->id = BPF_CORE_READ(made, kn, id);
	n->hierarchy = BPF_CORE_READ(made, root, hierarchy_id);
	length = bpf_probe_read_kernel_str(n->path, sizeof(n->path), path);
	n->length = length > 0 ? (u32)length - 1 : 0;
	bpf_ringbuf_submit(n, BPF_RB_NO_WAKEUP);
	return 0;
}

/* ---- direct reclaim: a task that needs memory has to free pages itself ---- */

static __always_inline void reclaim_begins(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task_btf();
	struct counted *c;

	if (!watched(task->tgid))
		return;
	c = bpf_task_storage_get(&threads, task, 0, 0);
	if (!c)
		c = first_counted(task);
	if (c)
		c->reclaim_from_ns = bpf_ktime_get_ns();
}

static __always_inline void reclaim_ends(u64 pages)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task_btf();
	struct counted *c = bpf_task_storage_get(&threads, task, 0, 0);
	struct usage_value *v;
	u64 from;

	if (!c || !c->reclaim_from_ns)
		return;
	from = c->reclaim_from_ns;
	c->reclaim_from_ns = 0;
	v = usage_of(task, c->party);
	if (!v)
		return;
	ADD_TO(v->reclaims, 1);
	ADD_TO(v->reclaim_ns, bpf_ktime_get_ns() - from);
	ADD_TO(v->reclaimed_pages, pages);
}

SEC("tp_btf/mm_vmscan_direct_reclaim_begin")
int BPF_PROG(on_reclaim)
{
	reclaim_begins();
	return 0;
}

SEC("tp_btf/mm_vmscan_direct_reclaim_end")
int BPF_PROG(on_reclaimed, unsigned long pages)
{
	reclaim_ends(pages);
	return 0;
}

SEC("tp_btf/mm_vmscan_memcg_reclaim_begin")
int BPF_PROG(on_group_reclaim)
{
	reclaim_begins();
	return 0;
}

SEC("tp_btf/mm_vmscan_memcg_reclaim_end")
int BPF_PROG(on_group_reclaimed, unsigned long pages)
{
	reclaim_ends(pages);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
