// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Calls of device APIs (CUDA, OpenCL, ...), seen at the functions' entry and return by uprobes.
 * The programs know no API: the attach cookie is the number of a site (one function of one file), whose
 * entry in `sites` has which arguments to read.
 *
 * APIs nest: the CUDA runtime calls the driver, a loader calls the loader below it. The outermost
 * call of a thread counts and what it calls in turn does not. While a call is going on, the return
 * address at its entry's stack pointer is the kernel's trampoline (that is how uretprobes work), so
 * one read of that word separates a nested call from one whose outer call was left by a longjmp.
 *
 * Probes are placed where the stack pointer is still that of the function's entry: return addresses and
 * stack arguments are read relative to it, and the kernel writes its trampoline there.
 */
#include "kernel_types.h"
#define __VMLINUX_H__ /* bpf_tracing.h: registers by the names the kernel gives them */
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#include "stack.h"
#include "task.h"
#include "walk_scratch.h"
#include "call_arguments.h"
#include "host_types.h"
#include "party.h"
#include "share.h"
#include "storage_share.h"

#define MAX_SITES 4096
#include "call_budget.h"

/* Two hits at one address so soon after one another are one call, seen by two probes. */
#define SAME_HIT_NS 5000

const volatile u64 long_ns = 1000000; /* a call this long always gets a stack and a span */
const volatile u32 spans_per_s = 250; /* shorter ones become spans up to this rate, per thread */

SWAPPED_ROWS(device_calls, struct call_key, struct call_value, 16384)
SPARE_ROWS(device_calls, struct call_key, struct call_value, 2048)

/* New rows in a window (share.h): first come, first served; then for each party. */
const volatile u64 free_rows = 4096;
const volatile u64 most_rows_of_one_party = 1024;
#define FREE_SPARE_ROWS 512
#define MOST_SPARE_ROWS_OF_ONE_PARTY 128

/* `what` of within_share, and a number that stands for all parties: none has it. */
enum shared { ROWS, SPARE };
#define EVERYBODY (~0ULL)

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SITES);
	__type(key, u32);
	__type(value, struct call_spec);
} sites SEC(".maps");

/* Every hit at a site, by any caller and with any outcome: user space compares it with the budget. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_SITES);
	__type(key, u32);
	__type(value, u64);
} hits SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1024 * 1024);
} call_spans SEC(".maps");

/* Keeps the struct in the object's BTF, where the loader reads its layout. */
const struct call_span *call_span_layout __attribute__((unused));

/*
 * A thread's outermost call. Only programs on the thread itself write to it, one after the other, but for
 * counted_ns: the scan takes that, too, so it is read and replaced in one atomic operation.
 */
struct in_call {
	u64 entry_sp; /* 0: in no call */
	u64 entry_ip;
	u64 began_ns;
	u64 counted_ns; /* time is summed up to here */
	u64 start_ns;	/* of the process */
	u64 bytes;
	u64 status_at; /* where the call writes its status, 0: nowhere */
	struct stack_chance chance;
	u64 span_second_ns; /* when the second began that `spans` counts in */
	u32 spans;
	u32 site;
	u32 direction;
	u32 flags;
	u32 nested;
	u32 result;
	/* The last call that was counted at its entry. */
	u64 seen_sp;
	u64 seen_ip;
	u64 seen_return; /* its return address */
	u64 seen_ns;
	u32 seen_site;
	u32 seen_call;
	u64 party;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct in_call);
} in_calls SEC(".maps");

/* Where the kernel keeps a process's trampoline: in its page for execution out of line (xol). */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct xol_area {
	unsigned long vaddr;
};
struct uprobes_state {
	struct xol_area *xol_area;
};
struct mm_struct___with_uprobes {
	struct uprobes_state uprobes_state;
};
struct task_struct___with_mm {
	struct mm_struct___with_uprobes *mm;
};
#pragma clang attribute pop

#if defined(__TARGET_ARCH_x86)
#define RETURN_POPS 8 /* a return takes its address off the stack */

/* Whether the outermost call has neither returned nor been left. */
static __always_inline bool going_on(struct task_struct *task, const struct in_call *call)
{
	struct task_struct___with_mm *with_mm = (void *)task;
	u64 page = BPF_CORE_READ(with_mm, mm, uprobes_state.xol_area, vaddr);
	u64 return_to = user_word(call->entry_sp);

	return page && return_to >= page && return_to < page + 4096;
}

/* Whether the call that was counted at its entry has not returned: its return address is still there. */
static __always_inline bool inside_seen(const struct in_call *call, u64 sp)
{
	return sp <= call->seen_sp && user_word(call->seen_sp) == call->seen_return;
}
#elif defined(__TARGET_ARCH_arm64)
#define RETURN_POPS 0

/* The return address is in a register: there is no word of the stack to look at. */
static __always_inline bool going_on(struct task_struct *task, const struct in_call *call)
{
	return true;
}

static __always_inline bool inside_seen(const struct in_call *call, u64 sp)
{
	return false;
}
#endif

static __always_inline s32 status_of(struct pt_regs *ctx, const struct in_call *call)
{
	u64 returned = PT_REGS_RC(ctx);

	switch (call->result) {
	case RESULT_STATUS:
		return (s32)returned;
	case RESULT_HANDLE:
		if (call->status_at)
			return (s32)user_int(call->status_at);
		return returned ? 0 : CALL_FAILED;
	default: /* RESULT_NONE: taken for a success */
		return 0;
	}
}

/*
 * Takes a call's stack at its return, where the frame pointer is the caller's again: at the entry, before
 * the prologue has pushed it, a walk by frame pointers would skip the caller. The callee is put in front.
 * Not static: a global function is verified once. To verify it along each path that leads here took 0.2 s
 * whenever the object was loaded.
 */
__noinline u64 take_call_stack(struct pt_regs *ctx __arg_ctx, u64 seed, u64 entry_ip)
{
	struct walk_scratch *mine = scratch_claim();
	u64 id;

	if (!mine)
		return 0;
	id = stack_take(ctx, &mine->walk, seed, true, entry_ip);
	scratch_release(mine);
	return id;
}

/* Whether this call gets a span: a long one always, others as long as the second has fewer. */
static __always_inline bool span_due(struct in_call *call, u64 now)
{
	if (now - call->began_ns >= long_ns)
		return true;
	if (now - call->span_second_ns >= 1000000000) {
		call->span_second_ns = now;
		call->spans = 0;
	}
	return call->spans++ < spans_per_s;
}

static __always_inline void keep_span(const struct in_call *call, const struct call_key *key,
				      u64 now)
{
	struct call_span *span = bpf_ringbuf_reserve(&call_spans, sizeof(*span), 0);

	if (!span) {
		count_loss(LOSS_RING_FULL);
		return;
	}
	span->start_time_ns = call->began_ns;
	span->end_time_ns = now;
	span->start_ns = key->start_ns;
	span->stack_id = key->stack_id;
	span->bytes = call->bytes;
	span->tgid = key->tgid;
	span->tid = key->tid;
	span->site = key->site;
	span->status = key->status;
	span->direction = key->direction;
	span->flags = key->flags;
	bpf_ringbuf_submit(span, BPF_RB_NO_WAKEUP);
}

/* Whether a new row of `what` may be made: one of the `free` for all, or of the `most` of one party. */
static __always_inline bool has_share(struct task_struct *task, u64 what, u64 free, u64 most)
{
	return within_share(EVERYBODY, what, free) || within_share(party_of(task), what, most);
}

/*
 * The row of a call. A function may return any status, and a process has as many threads and stacks as it
 * likes: so new rows are bounded for each party. Beyond that: by process, function, and whether it failed.
 */
static __noinline struct call_value *call_row(struct task_struct *task, struct call_key *key)
{
	const struct call_value zero = {};
	const struct call_key rest = {};
	struct call_value *v = known_row(&device_calls, key);

	if (!v && has_share(task, ROWS, free_rows, most_rows_of_one_party))
		v = find_row(&device_calls, key, &zero);
	if (v)
		return v;
	key->tid = 0;
	key->stack_id = 0;
	if (key->status != CALL_STATUS_UNKNOWN)
		key->status = key->status ? CALL_FAILED : 0;
	key->direction = CALL_ANY_DIRECTION;
	key->flags &= CALL_GOING_ON;
	if (known_row(&device_calls_spare, key) ||
	    has_share(task, SPARE, FREE_SPARE_ROWS, MOST_SPARE_ROWS_OF_ONE_PARTY))
		return spare_row_of(&device_calls_spare, key, &zero, &rest);
	v = known_row(&device_calls_spare, &rest);
	count_loss(v ? LOSS_TOGETHER : LOSS_COUNT_MAP_FULL);
	return v;
}

/*
 * A call that may run its caller's functions (callbacks): counted at its entry, with no probe on its return,
 * because an exception or a cancellation could not pass a frame whose return address is the kernel's
 * trampoline. A loader, such as OpenCL's, calls the function of the same name in the library below it: that
 * is one call. So is what two probes see at one address.
 */
static __always_inline int count_entry(struct pt_regs *ctx, struct task_struct *task,
				       struct in_call *call, u32 function)
{
	struct call_key key = {.tgid = task->tgid, .tid = task->pid, .start_ns = call->start_ns};
	u64 sp = PT_REGS_SP(ctx), ip = PT_REGS_IP(ctx), now = bpf_ktime_get_ns(), weight;
	struct walk_scratch *mine;
	struct call_value *v;

	if (call->seen_call == function && call->seen_site != call->site &&
	    (ip == call->seen_ip ? now - call->seen_ns < SAME_HIT_NS : inside_seen(call, sp)))
		return 0;
	call->seen_call = function;
	call->seen_site = call->site;
	call->seen_sp = sp;
	call->seen_ip = ip;
	call->seen_return = user_word(sp);
	call->seen_ns = now;
	key.site = call->site;
	key.status = CALL_STATUS_UNKNOWN;
	key.direction = call->direction;
	key.flags = call->flags;
	weight = stack_weight(&call->chance, call->site, now);
	mine = weight ? scratch_claim() : NULL;
	if (mine) {
		key.stack_id =
			stack_of(ctx, &mine->walk, seed_of(task, call->start_ns), false, true, 0);
		scratch_release(mine);
	}
	v = call_row(task, &key);
	if (v) {
		ADD_TO(v->count, 1);
		ADD_TO(v->bytes, call->bytes);
		ADD_TO(v->weight_count, weight);
		ADD_TO(v->weight_bytes, call->bytes * weight);
	}
	return 0;
}

static __always_inline int enter(struct pt_regs *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u32 site = bpf_get_attach_cookie(ctx);
	u64 sp = PT_REGS_SP(ctx), ip = PT_REGS_IP(ctx);
	u64 *hit = bpf_map_lookup_elem(&hits, &site), *left_out;
	struct call_spec *spec;
	struct in_call *call;

	if (hit)
		(*hit)++;
	left_out = hit_of_party(task, site);
	if (!watched(task->tgid))
		return 0;
	call = TASK_STORAGE(in_calls, task);
	if (!call) {
		count_loss(LOSS_TASK_STORAGE);
		return 0;
	}
	if (call->entry_sp) {
		/* A file can be attached twice for a moment, or under two names: one hit, one call. */
		if (sp == call->entry_sp && ip == call->entry_ip && site != call->site)
			return 0;
		if (sp <= call->entry_sp && going_on(task, call)) {
			call->nested++;
			return 0;
		}
		count_loss(LOSS_NESTED_CALL);
		call->entry_sp = 0;
		__sync_lock_test_and_set(&call->counted_ns, 0);
	}
	if (left_out) {
		__sync_fetch_and_add(left_out, 1);
		count_loss(LOSS_OVER_BUDGET);
		return 0;
	}
	spec = bpf_map_lookup_elem(&sites, &site);
	if (!spec)
		return 0;
	if (!call->start_ns)
		call->start_ns = start_of(task);
	call->entry_sp = sp;
	call->entry_ip = ip;
	call->site = site;
	call->nested = 0;
	call->flags = spec->blocking_arg >= 0 && (u32)argument(ctx, spec->blocking_arg) ?
			      CALL_BLOCKING :
			      0;
	call->bytes = bytes_of(ctx, spec);
	if (call->bytes > MAX_BYTES) /* a size that was never meant, and would spoil every sum */
		call->bytes = MAX_BYTES;
	call->direction = direction_of(ctx, spec);
	if (spec->at_entry) {
		call->entry_sp = 0;
		__sync_lock_test_and_set(&call->counted_ns, 0);
		return count_entry(ctx, task, call, spec->at_entry);
	}
	call->result = spec->result;
	call->status_at = spec->status_arg >= 0 ? argument(ctx, spec->status_arg) : 0;
	call->began_ns = bpf_ktime_get_ns();
	__sync_lock_test_and_set(&call->counted_ns, call->began_ns);
	return 0;
}

static __always_inline int leave(struct pt_regs *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct in_call *call = bpf_task_storage_get(&in_calls, task, 0, 0);
	u64 now = bpf_ktime_get_ns();
	struct call_key key = {};
	struct call_value *v;
	u64 ns, from, weight = 0;

	if (!call || !call->entry_sp)
		return 0;
	if (PT_REGS_SP(ctx) < call->entry_sp + RETURN_POPS) /* the return of a nested call */
		return 0;
	from = __sync_lock_test_and_set(&call->counted_ns, 0);
	if (PT_REGS_SP(ctx) != call->entry_sp + RETURN_POPS) { /* of an earlier call, given up */
		count_loss(LOSS_NESTED_CALL);
		call->entry_sp = 0;
		return 0;
	}
	if (now < from) /* the scan summed it up after we looked at the clock */
		now = from;
	ns = now - call->began_ns;
	weight = ns >= long_ns ? 1 : stack_weight(&call->chance, call->site, now);
	key.tgid = task->tgid;
	key.tid = task->pid;
	key.start_ns = call->start_ns;
	key.site = call->site;
	key.status = status_of(ctx, call);
	key.direction = call->direction;
	key.flags = call->flags;
	if (weight)
		key.stack_id = take_call_stack(ctx, seed_of(task, call->start_ns), call->entry_ip);
	if (span_due(call, now))
		keep_span(call, &key, now);
	v = call_row(task, &key);
	if (v) {
		ADD_TO(v->count, 1);
		ADD_TO(v->nested, call->nested);
		ADD_TO(v->ns, now - from);
		ADD_TO(v->bytes, call->bytes);
		ADD_TO(v->weight_count, weight);
		ADD_TO(v->weight_ns, ns * weight);
		ADD_TO(v->weight_bytes, call->bytes * weight);
		RAISE_TO(v->max_ns, ns);
	}
	call->entry_sp = 0;
	return 0;
}

NO_PROGRAMS(no_programs);
NO_PROGRAMS(no_programs_multi);

/* One attachment for all sites of a file where the kernel can (6.6), one each where it cannot. */
SEC("uprobe.multi")
int on_call_entry_multi(struct pt_regs *ctx)
{
	STAY_ON_STACK(ctx, no_programs_multi);
	return enter(ctx);
}

SEC("uretprobe.multi")
int on_call_return_multi(struct pt_regs *ctx)
{
	STAY_ON_STACK(ctx, no_programs_multi);
	return leave(ctx);
}

SEC("uprobe")
int on_call_entry(struct pt_regs *ctx)
{
	STAY_ON_STACK(ctx, no_programs);
	return enter(ctx);
}

SEC("uretprobe")
int on_call_return(struct pt_regs *ctx)
{
	STAY_ON_STACK(ctx, no_programs);
	return leave(ctx);
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(on_thread_exit, struct task_struct *task)
{
	struct in_call *call = bpf_task_storage_get(&in_calls, task, 0, 0);

	if (call && call->entry_sp)
		count_loss(LOSS_NESTED_CALL);
	return 0;
}

/*
 * Run by user space over all tasks before it drains: the time of calls still going on is summed up
 * to now, so that one that never returns (a device that hangs) is seen while it lasts. It has separate
 * rows (CALL_GOING_ON), since the thread itself may be adding to those of its calls.
 */
SEC("iter/task")
int on_scan(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct call_key key = {};
	struct call_value *v;
	struct in_call *call;
	u64 now, from, began;

	call = task ? bpf_task_storage_get(&in_calls, task, 0, 0) : NULL;
	RECOUNT(ctx, call, !task);
	if (!task || !call)
		return 0;
	from = call->counted_ns;
	now = bpf_ktime_get_ns();
	if (!from || now <= from)
		return 0;
	key.tgid = task->tgid;
	key.tid = task->pid;
	key.start_ns = call->start_ns;
	key.site = call->site;
	key.direction = call->direction;
	key.flags = call->flags | CALL_GOING_ON;
	began = call->began_ns; /* read now: after the exchange the thread may begin another */
	if (__sync_val_compare_and_swap(&call->counted_ns, from, now) != from)
		return 0;
	v = call_row(task, &key);
	if (!v)
		return 0;
	ADD_TO(v->ns, now - from);
	if (now > began && now - began > v->max_ns)
		v->max_ns = now - began;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
