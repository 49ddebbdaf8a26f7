// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Host memory by stack: what mmap and brk add to an address space, what is given back of it, and
 * which code touches pages for the first time. Runs on every page fault and at the end of every
 * system call, so it is off unless asked for.
 *
 * Totals are exact; stacks are sampled and weighted (stack.h). A mapping whose stack was taken is
 * followed, by its address, so that what is unmapped is reported with the stack that mapped it.
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
#include "memory_mappings.h"

#define PAGE_BYTES 4096ULL
#define GFP_MOVABLE 0x08 /* ___GFP_MOVABLE: pages of users, not the kernel's own */
#define FAULT_PRESENT 1	 /* x86's error code: the page is there, its rights forbid the access */
#define FAULT_WRITE 2
#define TICK_NS 1000000ULL	 /* the shortest jiffy, with HZ=1000 */
#define SURE_BYTES (16ULL << 20) /* a mapping as large as this always has its stack taken */

/* Where a process's heap ended (brk) when it was seen last. */
struct memory_break {
	u64 mm; /* its address space: another one after an exec */
	u64 end;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, u32);
	__type(value, struct memory_break);
} breaks SEC(".maps");

/*
 * Which of a thread's faults get a stack: one of each block of `length`, chosen at random, which counts
 * for all of them. The length is set before they come, by how fast those before came. So most faults
 * cost neither an exact clock nor a random number.
 */
struct fault_block {
	u64 began_ns;
	u32 length;
	u32 left; /* faults until the block ends */
	u32 wait; /* faults up to the chosen one; 0: it has come */
};

/* What is known of a thread that touches memory; `maps`: which of its mappings get a stack. */
struct touching {
	struct fault_block block;
	struct stack_chance maps;
	u64 start_ns;	/* of the process */
	u64 last_tick;	/* jiffies of the last fault */
	u64 last_stack; /* of the last fault, 0: none taken */
	u32 last_weight;
	u32 last_kind; /* 0: it had no fault yet */
	u64 faults;    /* of the last kind, in no row yet */
	u64 bytes;     /* of these */
	u64 party;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct touching);
} threads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct unwind_walk);
} scratch SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct mm_struct___memory {
	unsigned long brk;
};
struct task_struct___memory {
	int pagefault_disabled;
	struct mm_struct___memory *mm;
};
#pragma clang attribute pop

#if defined(__TARGET_ARCH_x86)

static __always_inline struct touching *touching_of(struct task_struct *task)
{
	struct touching *t = TASK_STORAGE(threads, task);

	if (!t)
		count_loss(LOSS_TASK_STORAGE);
	else if (!t->start_ns)
		t->start_ns = start_of(task);
	return t;
}

/* The id of the user stack alone: what the kernel does to map memory is always the same. 0: no room. */
static __always_inline u64 user_stack(void *ctx, struct task_struct *task, u64 seed)
{
	const u32 first = 0;
	struct unwind_walk *w = bpf_map_lookup_elem(&scratch, &first);

	if (!w)
		return 0;
	w->pieces[0].kernel_len = 0;
	w->stop = STOP_ENTRY;
	unwind(ctx, w, task, 0);
	if (!w->piece && !w->slot)
		count_loss(LOSS_USER_STACK);
	return keep_walk(w, seed);
}

static __always_inline struct memory_key key_of(struct task_struct *task, const struct touching *t,
						u32 kind)
{
	struct memory_key key = {
		.tgid = task->tgid,
		.tid = task->pid,
		.start_ns = t->start_ns,
		.kind = kind,
	};

	return key;
}

/* ---- page faults ---- */

/* The next block: of the length with which about one stack comes in stack_gap_ns. */
static __always_inline void next_block(struct fault_block *b, u64 now)
{
	u64 took = now - b->began_ns, length = stack_divisor_max;

	if (took >= stack_gap_ns * 16 || !b->length)
		length = 1; /* after a pause: the next fault gets a stack */
	else if (took)
		length = b->length * stack_gap_ns / took;
	if (length > 2 * b->length)
		length = 2 * b->length;
	if (length > stack_divisor_max)
		length = stack_divisor_max;
	if (!length)
		length = 1;
	b->began_ns = now;
	b->length = b->left = length;
	b->wait = 1 + (length > 1 ? bpf_get_prandom_u32() % length : 0);
}

/* The weight with which this fault gets a stack, 0 for none. */
static __always_inline u32 fault_weight(struct touching *t, u64 tick)
{
	struct fault_block *b = &t->block;

	/* A block from long ago is given up before its end: its length does not fit the rate of now. */
	if (!b->left || tick > t->last_tick + 1 + 16 * stack_gap_ns / TICK_NS)
		next_block(b, bpf_ktime_get_ns());
	b->left--;
	return b->wait && !--b->wait ? b->length : 0;
}

/* Adds to a row what was counted of a thread since it was last added. */
static __always_inline void flush(struct task_struct *task, struct touching *t)
{
	struct memory_key key = {
		.tgid = BPF_CORE_READ(task, tgid),
		.tid = BPF_CORE_READ(task, pid),
		.start_ns = t->start_ns,
		.kind = t->last_kind,
	};
	u64 faults = __sync_lock_test_and_set(&t->faults, 0);
	u64 bytes = __sync_lock_test_and_set(&t->bytes, 0);

	if (faults || bytes)
		add(&key, t->party, faults, bytes, 0, 0);
}

static __always_inline int fault(void *ctx, u64 address, u64 error)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct touching *t = bpf_task_storage_get(&threads, task, 0, 0);
	u32 kind = MEMORY_READ, weight;
	struct memory_key key;
	u64 tick;

	/* Not of kernel addresses, nor of code that reads with faults disabled, as BPF programs do: there no
	 * page is brought in. */
	if (address >> 63 || ((struct task_struct___memory *)task)->pagefault_disabled)
		return 0;
	if (!t) { /* the first fault of the thread, or it is not watched */
		if (!watched(task->tgid) || !has_user_frames(task))
			return 0;
		t = touching_of(task);
		if (!t)
			return 0;
	}
	if (error & FAULT_WRITE)
		kind = error & FAULT_PRESENT ? MEMORY_COPY : MEMORY_WRITE;
	tick = bpf_jiffies64();
	weight = fault_weight(t, tick);
	t->last_tick = tick;
	if (kind != t->last_kind)
		flush(task, t);
	t->last_kind = kind;
	t->last_weight = weight;
	t->last_stack = 0;
	if (!weight) {
		__sync_fetch_and_add(&t->faults, 1);
		__sync_fetch_and_add(&t->bytes, PAGE_BYTES);
		return 0;
	}
	key = key_of(task, t, kind);
	key.stack_id = t->last_stack = user_stack(ctx, task, seed_of(task, key.start_ns));
	add(&key, t->party, 1, PAGE_BYTES, weight, weight * PAGE_BYTES);
	return 0;
}

SEC("tp_btf/page_fault_user")
int BPF_PROG(on_user_fault, unsigned long address, struct pt_regs *regs, unsigned long error)
{
	return fault(ctx, address, error);
}

/* A system call that touches memory of its caller. */
SEC("tp_btf/page_fault_kernel")
int BPF_PROG(on_kernel_fault, unsigned long address, struct pt_regs *regs, unsigned long error)
{
	return fault(ctx, address, error);
}

struct page;

/* A fault that is served with more than one page: the others are added here. Of user memory there are no
 * folios of order 1; 18: 1 GiB. */
SEC("tp_btf/mm_page_alloc")
int BPF_PROG(on_pages, struct page *page, unsigned int order, unsigned int gfp)
{
	struct task_struct *task;
	struct memory_key key;
	struct touching *t;
	u64 more;

	if (order < 2 || order > 18 || !(gfp & GFP_MOVABLE))
		return 0;
	task = bpf_get_current_task_btf();
	t = bpf_task_storage_get(&threads, task, 0, 0);
	if (!t || !t->last_kind)
		return 0;
	/* In a system call the pages may be another's: they are the fault's only if that was just now. */
	if ((long)BPF_CORE_READ((struct pt_regs *)bpf_task_pt_regs(task), orig_ax) >= 0 &&
	    bpf_jiffies64() > t->last_tick + 1)
		return 0;
	more = (PAGE_BYTES << order) - PAGE_BYTES;
	if (!t->last_weight) {
		__sync_fetch_and_add(&t->bytes, more);
		return 0;
	}
	key = key_of(task, t, t->last_kind);
	key.stack_id = t->last_stack;
	add(&key, t->party, 0, more, 0, more * t->last_weight);
	return 0;
}

/* ---- mappings ---- */

/* What a system call mapped; `bytes` is 0 where it mapped nothing. */
struct entered {
	u64 from;
	u64 bytes;
	u64 stack_id;
	u32 kind;
	u32 weight;
};

/* Counts a new mapping, and follows it where it has a stack. Not inlined, as `count_unmapped`: the stack of a program
 * and of what it calls is 512 bytes together. */
static __noinline void count_mapping(struct task_struct *task, struct touching *t,
				     const struct entered *new)
{
	struct memory_key key = key_of(task, t, new->kind);
	struct memory_mapping m = {
		.start_ns = t->start_ns,
		.bytes = new->bytes,
		.stack_id = new->stack_id,
		.tid = key.tid,
		.kind = new->kind,
		.weight = new->weight,
		.party = t->party,
	};

	key.stack_id = m.stack_id;
	add(&key, t->party, 1, m.bytes, m.weight, m.bytes * m.weight);
	if (m.stack_id)
		follow(key.tgid, new->from, &m);
}

/* A new mapping gets a stack by chance. */
static __always_inline void enter(void *ctx, struct task_struct *task, struct touching *t,
				  struct entered *new)
{
	new->weight = stack_weight(&t->maps, new->kind, bpf_ktime_get_ns());
	if (new->bytes >= SURE_BYTES)
		new->weight = 1;
	if (new->weight && !may_follow(t->party)) {
		count_loss(LOSS_MAPPINGS);
		new->weight = 0;
	}
	if (new->weight)
		new->stack_id = user_stack(ctx, task, seed_of(task, t->start_ns));
	count_mapping(task, t, new);
}

/* Sets where the heap of a process ends. `before`: where it ended; returns false where that was not known. */
static __always_inline bool move_break(struct task_struct *task, u64 now, u64 *before)
{
	struct memory_break b = {
		.mm = (u64)BPF_CORE_READ(task, mm),
		.end = now,
	};
	u32 tgid = task->tgid;
	struct memory_break *known = bpf_map_lookup_elem(&breaks, &tgid);
	bool is_known = known && known->mm == b.mm;

	if (is_known)
		*before = known->end;
	if (known)
		*known = b;
	else if (bpf_map_update_elem(&breaks, &tgid, &b, BPF_ANY))
		count_loss(LOSS_MAPPINGS);
	return is_known;
}

static __always_inline u64 in_pages(u64 bytes)
{
	return (bytes + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
}

#define CALL_MMAP 9
#define CALL_MUNMAP 11
#define CALL_BRK 12
#define CALL_MREMAP 25
#define USER_CODE 0x33 /* cs of 64-bit programs: others number their calls differently */
#define MAP_SHARED_ 1
#define MAP_ANONYMOUS_ 0x20

static __always_inline struct entered on_mmap(struct task_struct *task, struct touching *t,
					      struct pt_regs *regs, u64 at)
{
	struct entered new = {.from = at, .bytes = in_pages(regs->si), .kind = MEMORY_ANONYMOUS};
	u64 flags = regs->r10;

	/* Nothing else is there now: what is still followed there was replaced (MAP_FIXED), or its end unseen. */
	leave(task, t->start_ns, at, new.bytes);
	if (!(flags & MAP_ANONYMOUS_))
		new.kind = MEMORY_FILE;
	else if (!regs->dx)
		new.kind = MEMORY_RESERVED;
	else if (flags & MAP_SHARED_)
		new.kind = MEMORY_SHARED;
	return new;
}

static __always_inline struct entered on_mremap(struct task_struct *task, struct touching *t,
						struct pt_regs *regs, u64 at)
{
	u64 before = in_pages(regs->si), after = in_pages(regs->dx);
	struct leaving l = leave(task, t->start_ns, regs->di, before);
	struct entered new = {.from = at, .bytes = after, .kind = l.kind};

	leave(task, t->start_ns, at, after);
	if (l.followed)
		return new;
	/* Of a mapping that is not followed only what it grew by counts. */
	new.from += before;
	new.bytes = after > before ? after - before : 0;
	new.kind = MEMORY_ANONYMOUS;
	return new;
}

static __noinline void count_unmapped(struct task_struct *task, struct touching *t, u64 bytes)
{
	struct memory_key key = key_of(task, t, MEMORY_UNMAPPED);

	add(&key, t->party, 1, bytes, 0, 0);
}

static __always_inline void unmapped(struct task_struct *task, struct touching *t, u64 at,
				     u64 bytes)
{
	leave(task, t->start_ns, at, bytes);
	count_unmapped(task, t, bytes);
}

static __always_inline struct entered on_brk(struct task_struct *task, struct touching *t, u64 now)
{
	struct entered new = {.kind = MEMORY_HEAP};
	u64 before = 0;

	if (!move_break(task, now, &before))
		return new;
	before = in_pages(before);
	now = in_pages(now);
	new.from = before;
	if (now > before)
		new.bytes = now - before;
	else if (now < before)
		unmapped(task, t, now, before - now);
	return new;
}

/* At the end of a system call its arguments are still in `regs`. */
SEC("tp_btf/sys_exit")
int BPF_PROG(on_call, struct pt_regs *regs, long result)
{
	long nr = regs->orig_ax;
	struct entered new = {};
	struct task_struct *task;
	struct touching *t;

	if (nr != CALL_MMAP && nr != CALL_MUNMAP && nr != CALL_BRK && nr != CALL_MREMAP)
		return 0;
	task = bpf_get_current_task_btf();
	if ((u64)result > -PAGE_BYTES || regs->cs != USER_CODE || !watched(task->tgid))
		return 0;
	t = touching_of(task);
	if (!t)
		return 0;
	if (nr == CALL_MMAP)
		new = on_mmap(task, t, regs, result);
	else if (nr == CALL_MUNMAP)
		unmapped(task, t, regs->di, in_pages(regs->si));
	else if (nr == CALL_BRK)
		new = on_brk(task, t, result);
	else
		new = on_mremap(task, t, regs, result);
	if (new.bytes)
		enter(ctx, task, t, &new);
	return 0;
}

/* ---- what was counted and is in no row: of every thread before each drain, of one that ends (on_end) ---- */

SEC("iter/task")
int on_sum(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct touching *t = task ? bpf_task_storage_get(&threads, task, 0, 0) : NULL;

	RECOUNT(ctx, t, !task);
	if (task && t)
		flush(task, t);
	return 0;
}

/* ---- where heaps end: at the start of all processes, then of those that fork and exit ---- */

static __always_inline void note_break(struct task_struct *task)
{
	struct memory_break b = {.mm = (u64)BPF_CORE_READ(task, mm)};
	u32 tgid = BPF_CORE_READ(task, tgid);

	if (!b.mm)
		return;
	b.end = BPF_CORE_READ((struct task_struct___memory *)task, mm, brk);
	if (bpf_map_update_elem(&breaks, &tgid, &b, BPF_ANY))
		count_loss(LOSS_MAPPINGS);
}

SEC("iter/task")
int on_scan(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;

	if (task && task->pid == task->tgid && watched(task->tgid))
		note_break(task);
	return 0;
}

SEC("tp_btf/sched_process_fork")
int BPF_PROG(on_fork, struct task_struct *parent, struct task_struct *child)
{
	if (child->pid == child->tgid && watched(child->tgid))
		note_break(child);
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(on_end, struct task_struct *task)
{
	struct touching *t = bpf_task_storage_get(&threads, task, 0, 0);
	u32 tgid = task->tgid;

	if (t)
		flush(task, t);
	if (!BPF_CORE_READ(task, signal, live.counter)) /* the last of its threads */
		bpf_map_delete_elem(&breaks, &tgid);
	return 0;
}

#endif /* __TARGET_ARCH_x86 */

char LICENSE[] SEC("license") = "Dual BSD/GPL";
