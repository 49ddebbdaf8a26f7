/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Walks the user stack of the current task in the kernel: by unwind tables, by frame pointers where
 * code has none, and by CPython's own frames where its evaluation loop is on the stack.
 *
 * One source for every program type: each object that includes this brings its own scratch memory
 * and shares the maps, which unwind.bpf.c owns. The loop is bpf_loop (5.17), so no tail calls are
 * needed and one walk is one program; older kernels get frame pointers alone.
 */
#ifndef SONDE_UNWIND_H
#define SONDE_UNWIND_H

#include "../abi/unwind.h"

#define UNWIND_STEPS 1200 /* frames looked at, Python's among them */
#define UNWIND_PIECES 8	  /* of SONDE_USER_FRAMES words */
#define PYTHON_FRAME_BYTES 112
#define ABSENT 0xffff

/* Keep the structs in the object's BTF, where the loader reads their size. */
const struct unwind_chunk *unwind_chunk_layout __attribute__((unused));
const struct unwind_process *unwind_process_layout __attribute__((unused));

struct unwind_chunk_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct unwind_chunk);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, UNWIND_CHUNKS);
	__type(key, u32);
	__array(values, struct unwind_chunk_map);
} unwind_chunks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, UNWIND_PROCESSES);
	__type(key, u32);
	__type(value, struct unwind_process);
} unwind_processes SEC(".maps");

/* Processes met without an entry, or with a stale one: user space reads and empties it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, UNWIND_PROCESSES);
	__type(key, u32);
	__type(value, u32);
} unwind_wanted SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STOP_MAX);
	__type(key, u32);
	__type(value, u64);
} unwind_stops SEC(".maps");

/* Time of walks of cost_words or more words, in steps of 250 ns; the last takes what is longer. */
#define COST_STEPS 256
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COST_STEPS);
	__type(key, u32);
	__type(value, u64);
} unwind_cost SEC(".maps");

const volatile u32 cost_words = 0; /* 0: do not measure */

/* The state of a walk: large, so it lies in a map. */
struct unwind_walk {
	u64 pc;
	u64 sp;
	u64 bp;
	u64 registers[16]; /* of the first frame, by DWARF's numbers */
	u64 python_frame;
	u64 thread_base;
	struct unwind_process process;
	struct unwind_range range; /* the one found last */
	u32 has_range;
	u32 is_return; /* pc is behind a call */
	u32 is_first;
	u32 in_python;	  /* between an evaluation loop's first Python frame and its last */
	u32 python_known; /* python_frame holds the next one */
	u32 stop;
	u32 piece;
	u32 slot;
	u32 low; /* bounds of a search: here the verifier does not follow every path of it */
	u32 high;
	u8 frame[PYTHON_FRAME_BYTES];
	struct sonde_stack pieces[UNWIND_PIECES];
};

static __always_inline void count_stop(u32 why)
{
	u64 *n = bpf_map_lookup_elem(&unwind_stops, &why);

	if (n)
		(*n)++;
}

#if defined(__TARGET_ARCH_x86)

enum bpf_func_id___with_loop {
	BPF_FUNC_loop___with_loop = 181,
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct return_instance___unwind {
	unsigned long stack;
	unsigned long orig_ret_vaddr;
	struct return_instance___unwind *next;
};
struct uprobe_task___unwind {
	struct return_instance___unwind *return_instances;
};
struct thread_struct___unwind {
	unsigned long fsbase;
};
struct mm_struct___unwind {
	unsigned long start_code;
};
struct task_struct___unwind {
	struct mm_struct___unwind *mm;
	struct thread_struct___unwind thread;
	struct uprobe_task___unwind *utask;
};
#pragma clang attribute pop

static __always_inline bool put(struct unwind_walk *w, u64 word)
{
	u32 piece = w->piece, slot = w->slot;

	if (slot >= SONDE_USER_FRAMES) {
		slot = 0;
		w->piece = ++piece;
	}
	if (piece >= UNWIND_PIECES) {
		w->stop = STOP_DEPTH;
		w->piece = UNWIND_PIECES - 1;
		w->slot = SONDE_USER_FRAMES;
		return false;
	}
	w->pieces[piece].user[slot] = word;
	w->slot = slot + 1;
	return true;
}

/* The chunk that a reference leads into. */
static __always_inline struct unwind_chunk *chunk_of(u32 reference)
{
	const u32 first = 0;
	u32 number = reference >> 16;
	void *map = bpf_map_lookup_elem(&unwind_chunks, &number);

	return map ? bpf_map_lookup_elem(map, &first) : NULL;
}

/* Keeps clang from knowing more about a number than the verifier does. */
#define OPAQUE(x) asm volatile("" : "+r"(x))

static __always_inline void *place(struct unwind_chunk *chunk, u32 reference, u32 words)
{
	u32 at = reference & 0xffff;

	OPAQUE(at);
	at &= 0xffff;
	if (at > UNWIND_CHUNK_WORDS - words)
		return NULL;
	OPAQUE(at); /* the pointer is made after the check, not before */
	return &chunk->words[at];
}

#define RANGE_WORDS (sizeof(struct unwind_range) / 4)

/* Find the mapping that holds `pc`; false where there is none. */
static __always_inline bool find_range(struct unwind_walk *w, u64 pc)
{
	u32 first = w->process.ranges;
	struct unwind_chunk *chunk;
	struct unwind_range *r;

	if (w->has_range && pc >= w->range.start && pc < w->range.end)
		return true;
	chunk = chunk_of(first);
	if (!chunk)
		return false;
	w->low = 0;
	w->high = w->process.range_count;
	for (int i = 0; i < 13; i++) { /* 2^12 = UNWIND_MAX_RANGES */
		u32 middle = (w->low + w->high) >> 1;

		if (w->low >= w->high)
			break;
		r = place(chunk, first + middle * RANGE_WORDS, RANGE_WORDS);
		if (!r)
			return false;
		if (r->start <= pc)
			w->low = middle + 1;
		else
			w->high = middle;
	}
	if (!w->low)
		return false;
	r = place(chunk, first + (w->low - 1) * RANGE_WORDS, RANGE_WORDS);
	if (!r || pc < r->start || pc >= r->end)
		return false;
	w->range = *r;
	w->has_range = 1;
	return true;
}

/* Find the rule for the code at `address` (as linked) of the mapping found last. */
static __always_inline bool find_rule(struct unwind_walk *w, u64 address, struct unwind_rule *rule)
{
	u64 page = (address >> 16) - w->range.first_page;
	u32 inner = address & 0xffff, rows;
	struct unwind_chunk *chunk;
	struct unwind_rule *found;
	u32 *entry, *row;

	if (page >= w->range.page_count)
		return false;
	rows = w->range.pages + 2 * (u32)page;
	chunk = chunk_of(rows);
	entry = chunk ? place(chunk, rows, 2) : NULL;
	if (!entry)
		return false;
	rows = entry[0];
	w->low = 0;
	w->high = entry[1];
	chunk = chunk_of(rows);
	if (!chunk)
		return false;
	for (int i = 0; i < 17; i++) {
		u32 middle = (w->low + w->high) >> 1;

		if (w->low >= w->high)
			break;
		row = place(chunk, rows + middle, 1);
		if (!row)
			return false;
		if (*row >> 16 <= inner)
			w->low = middle + 1;
		else
			w->high = middle;
	}
	row = w->low ? place(chunk, rows + w->low - 1, 1) : NULL;
	if (!row)
		return false;
	rows = w->range.rules + 4 * (*row & 0xffff);
	chunk = chunk_of(rows);
	found = chunk ? place(chunk, rows, 4) : NULL;
	if (!found)
		return false;
	*rule = *found;
	return true;
}

static __always_inline long read_user(void *to, u32 size, u64 from)
{
	return bpf_probe_read_user(to, size, (void *)from);
}

/* A return address may have been replaced by the kernel's trampoline: what it was. */
static __always_inline bool see_through_trampoline(struct unwind_walk *w)
{
	struct task_struct___unwind *task = (void *)bpf_get_current_task();
	struct uprobe_task___unwind *utask = BPF_CORE_READ(task, utask);
	struct return_instance___unwind *at;

	if (!utask)
		return false;
	at = BPF_CORE_READ(utask, return_instances);
	for (int i = 0; i < 16 && at; i++) {
		if (BPF_CORE_READ(at, stack) == w->sp - 8) {
			w->pc = BPF_CORE_READ(at, orig_ret_vaddr);
			return true;
		}
		at = BPF_CORE_READ(at, next);
	}
	return false;
}

/* To the caller by frame pointers. */
static __always_inline long step_by_frame_pointer(struct unwind_walk *w, u32 why)
{
	u64 saved[2];

	if (!w->bp || w->bp < w->sp || w->bp & 7) {
		w->stop = why;
		return 1;
	}
	if (read_user(saved, sizeof(saved), w->bp)) {
		w->stop = why;
		return 1;
	}
	if (!saved[1]) {
		w->stop = STOP_ENTRY;
		return 1;
	}
	w->sp = w->bp + 16;
	w->bp = saved[0];
	w->pc = saved[1];
	w->is_return = 1;
	w->is_first = 0;
	return 0;
}

static __always_inline bool in_evaluation(const struct unwind_walk *w, u64 pc)
{
	const struct unwind_python *p = &w->process.python;

	return w->process.has_python && ((pc >= p->eval[0] && pc < p->eval[1]) ||
					 (pc >= p->eval[2] && pc < p->eval[3]));
}

/* The newest Python frame of the thread; false where it has none that we can reach. */
static __always_inline bool python_enter(struct unwind_walk *w)
{
	const struct unwind_python *p = &w->process.python;
	u64 values = w->thread_base, thread = 0, frame = 0;
	u32 key[2];

	if (w->python_known)
		return w->python_frame != 0;
	w->python_known = 1;
	w->python_frame = 0;
	if (!values || read_user(key, sizeof(key), p->tss_at) || !key[0])
		goto none;
	if (p->tsd_deref != ABSENT) {
		if (read_user(&values, 8, values + p->tsd_deref))
			goto none;
	} else if (key[1] >= 32) {
		goto none;
	}
	if (read_user(&thread, 8, values + p->tsd + key[1] * p->tsd_stride) || !thread)
		goto none;
	if (read_user(&frame, 8, thread + p->frame_of_thread))
		goto none;
	if (p->frame_of_cframe != ABSENT && read_user(&frame, 8, frame + p->frame_of_cframe))
		goto none;
	w->python_frame = frame;
	if (frame)
		return true;
none:
	count_stop(PYTHON_NO_THREAD);
	return false;
}

#define FIELD(w, type, offset)                                                                     \
	(*(type *)&(w)->frame[(offset) <= PYTHON_FRAME_BYTES - 8 ? (offset) : 0])

/* One Python frame; the last of an evaluation loop leads back to native frames. */
static __always_inline long python_step(struct unwind_walk *w)
{
	const struct unwind_python *p = &w->process.python;
	u16 at_previous = p->previous, at_code = p->code, at_instruction = p->instruction;
	u16 at_owner = p->owner, at_entry = p->entry;
	u64 code, place_in_code, previous;
	bool is_last = false;
	u32 line = 0;

	if (!w->python_frame) {
		w->in_python = 0;
		return 0;
	}
	if (read_user(w->frame, sizeof(w->frame), w->python_frame)) {
		count_stop(PYTHON_MEMORY);
		w->python_frame = 0;
		w->in_python = 0;
		return 0;
	}
	previous = FIELD(w, u64, at_previous);
	w->python_frame = previous;
	if (at_owner != ABSENT) {
		if (FIELD(w, u8, at_owner) >= p->owner_entry) {
			w->in_python = 0;
			return 0;
		}
	} else {
		is_last = at_entry == ABSENT || FIELD(w, u8, at_entry);
	}
	code = FIELD(w, u64, at_code) & ~7ULL;
	if (p->instruction_is_index)
		place_in_code = FIELD(w, u32, at_instruction);
	else
		place_in_code = FIELD(w, u64, at_instruction) - code;
	if (read_user(&line, sizeof(line), code + p->line))
		count_stop(PYTHON_MEMORY);
	/* The two words are kept together or not at all. */
	if (w->slot == SONDE_USER_FRAMES - 1 && !put(w, 0))
		return 1;
	if (!put(w, PYTHON_FRAME | code) ||
	    !put(w, PYTHON_FRAME | (u64)(line & 0x7fffffff) << 32 | (u32)place_in_code))
		return 1;
	if (is_last)
		w->in_python = 0;
	return 0;
}

static __always_inline long native_step(struct unwind_walk *w)
{
	struct unwind_rule rule = {};
	u64 pc = w->pc, look_at, cfa, saved[2], bp;

	if (!find_range(w, pc)) {
		if (w->is_return && see_through_trampoline(w)) {
			pc = w->pc;
			if (!find_range(w, pc))
				goto unmapped;
			goto mapped;
		}
unmapped:
		if (!put(w, pc))
			return 1;
		return step_by_frame_pointer(w, STOP_NO_MAPPING);
	}
mapped:
	look_at = pc - (w->is_return ? 1 : 0);
	if (in_evaluation(w, look_at) && python_enter(w))
		w->in_python = 1;
	else if (!put(w, pc))
		return 1;
	if (!w->range.page_count)
		return step_by_frame_pointer(w, STOP_NO_RULE);
	if (!find_rule(w, look_at - w->range.bias, &rule)) {
		w->stop = STOP_TABLE;
		return 1;
	}
	switch (rule.cfa) {
	case CFA_NONE:
		return step_by_frame_pointer(w, STOP_NO_RULE);
	case CFA_END:
		w->stop = STOP_ENTRY;
		return 1;
	case CFA_RSP:
		cfa = w->sp + rule.offset;
		break;
	case CFA_RBP:
		cfa = w->bp + rule.offset;
		break;
	case CFA_PLT:
		cfa = w->sp + rule.offset + ((pc & 15) >= rule.extra ? 8 : 0);
		break;
	case CFA_REGISTER:
		if (!w->is_first || rule.reg > 15) {
			w->stop = STOP_REGISTER;
			return 1;
		}
		cfa = w->registers[rule.reg & 15] + rule.offset;
		break;
	case CFA_RSP_DEREF:
	case CFA_RBP_DEREF:
		if (read_user(&cfa, 8, (rule.cfa == CFA_RSP_DEREF ? w->sp : w->bp) + rule.offset)) {
			w->stop = STOP_MEMORY;
			return 1;
		}
		cfa += rule.extra;
		break;
	case CFA_SIGNAL:
		cfa = w->sp;
		if (read_user(&w->bp, 8, cfa + rule.rbp_offset) ||
		    read_user(&w->sp, 8, cfa + rule.offset) ||
		    read_user(&w->pc, 8, cfa + rule.extra)) {
			w->stop = STOP_MEMORY;
			return 1;
		}
		w->is_return = 0; /* interrupted there, not called from there */
		w->is_first = 0;
		return 0;
	default:
		w->stop = STOP_UNSUPPORTED;
		return 1;
	}
	bp = w->bp;
	if (rule.rbp == RBP_AT_CFA && rule.rbp_offset == -16) { /* beside the return address */
		if (read_user(saved, sizeof(saved), cfa - 16))
			goto unreadable;
		bp = saved[0];
	} else {
		if (read_user(&saved[1], 8, cfa - 8))
			goto unreadable;
		if (rule.rbp == RBP_AT_CFA || rule.rbp == RBP_AT_RBP) {
			u64 at = (rule.rbp == RBP_AT_CFA ? cfa : w->bp) + rule.rbp_offset;

			if (read_user(&bp, 8, at))
				goto unreadable;
		} else if (rule.rbp == RBP_UNKNOWN) {
			bp = 0;
		}
	}
	if (cfa <= w->sp) {
		w->stop = STOP_NO_PROGRESS;
		return 1;
	}
	if (!saved[1]) {
		w->stop = STOP_ENTRY;
		return 1;
	}
	w->pc = saved[1];
	w->sp = cfa;
	w->bp = bp;
	w->is_return = 1;
	w->is_first = 0;
	return 0;
unreadable:
	w->stop = STOP_MEMORY;
	return 1;
}

static long unwind_step(u32 i, void *arg)
{
	struct unwind_walk *w = *(struct unwind_walk **)arg;

	return w->in_python ? python_step(w) : native_step(w);
}

static __always_inline bool start_walk(struct unwind_walk *w)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct task_struct___unwind *more = (void *)task;
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
	u32 tgid = task->tgid, one = 1;
	struct unwind_process *process = bpf_map_lookup_elem(&unwind_processes, &tgid);

	w->has_range = w->is_return = w->in_python = w->python_known = 0;
	w->is_first = 1;
	if (!process) {
		w->stop = STOP_NO_PROCESS;
		goto unknown;
	}
	w->process = *process;
	if (w->process.tgid != tgid ||
	    w->process.start_code != BPF_CORE_READ(more, mm, start_code)) {
		w->stop = STOP_EXEC;
		goto unknown;
	}
	w->pc = BPF_CORE_READ(regs, ip);
	w->sp = BPF_CORE_READ(regs, sp);
	w->bp = BPF_CORE_READ(regs, bp);
	if (!w->pc || w->pc >> 63) {
		w->stop = STOP_REGISTERS;
		return false;
	}
	w->registers[0] = BPF_CORE_READ(regs, ax);
	w->registers[1] = BPF_CORE_READ(regs, dx);
	w->registers[2] = BPF_CORE_READ(regs, cx);
	w->registers[3] = BPF_CORE_READ(regs, bx);
	w->registers[4] = BPF_CORE_READ(regs, si);
	w->registers[5] = BPF_CORE_READ(regs, di);
	w->registers[6] = w->bp;
	w->registers[7] = w->sp;
	w->registers[8] = BPF_CORE_READ(regs, r8);
	w->registers[9] = BPF_CORE_READ(regs, r9);
	w->registers[10] = BPF_CORE_READ(regs, r10);
	w->registers[11] = BPF_CORE_READ(regs, r11);
	w->registers[12] = BPF_CORE_READ(regs, r12);
	w->registers[13] = BPF_CORE_READ(regs, r13);
	w->registers[14] = BPF_CORE_READ(regs, r14);
	w->registers[15] = BPF_CORE_READ(regs, r15);
	w->thread_base = BPF_CORE_READ(more, thread.fsbase);
	return true;
unknown:
	bpf_map_update_elem(&unwind_wanted, &tgid, &one, BPF_ANY);
	return false;
}

static __always_inline bool has_loop(void)
{
	return bpf_core_enum_value_exists(enum bpf_func_id___with_loop, BPF_FUNC_loop___with_loop);
}

#endif /* __TARGET_ARCH_x86 */

static __always_inline void walk_by_frame_pointers(void *ctx, struct unwind_walk *w)
{
	struct sonde_stack *s = &w->pieces[0];
	u32 slot = w->slot;
	long n;

	if (slot > 1)
		return;
	n = bpf_get_stack(ctx, &s->user[slot], sizeof(s->user) - sizeof(s->user[0]),
			  BPF_F_USER_STACK);
	if (n > 0)
		w->slot = slot + (u32)n / sizeof(u64);
}

/* Walk into w->pieces. `first`: a frame to put in front, 0 for none. */
static __always_inline void unwind(void *ctx, struct unwind_walk *w, u64 first)
{
	w->piece = 0;
	w->slot = 0;
	if (first) {
		w->pieces[0].user[0] = first;
		w->slot = 1;
	}
#if defined(__TARGET_ARCH_x86)
	if (has_loop()) {
		u64 began = cost_words ? bpf_ktime_get_ns() : 0;

		if (start_walk(w)) {
			w->stop = STOP_DEPTH;
			bpf_loop(UNWIND_STEPS, unwind_step, &w, 0);
		} else if (w->stop == STOP_NO_PROCESS || w->stop == STOP_EXEC) {
			walk_by_frame_pointers(ctx, w);
		}
		if (cost_words && w->piece * SONDE_USER_FRAMES + w->slot >= cost_words) {
			u64 steps = (bpf_ktime_get_ns() - began) / 250, *n;
			u32 step = steps < COST_STEPS ? steps : COST_STEPS - 1;

			n = bpf_map_lookup_elem(&unwind_cost, &step);
			if (n)
				(*n)++;
		}
		count_stop(w->stop);
		return;
	}
#endif
	w->stop = STOP_NO_HELPER;
	walk_by_frame_pointers(ctx, w);
	count_stop(w->stop);
}

#endif
