/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The kernel's walker (bpf/unwind.h) as a library of the host: it walks a thread that was recorded,
 * by its registers, its memory and the tables, without the process and without a kernel.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#undef NULL
#undef __always_inline
#define __TARGET_ARCH_x86
#include "../../../bpf/kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "../../../abi/events.h"
#include "../../../bpf/unwind.h"

#define MAX_PIECES_OF_MEMORY 4096
#define NOT_RECORDED 0xa5

typedef int (*reader)(u64 from, u32 size, void *to);

static struct {
	struct {
		u64 from;
		u64 size;
		const u8 *bytes;
	} memory[MAX_PIECES_OF_MEMORY];
	u32 pieces;
	struct unwind_chunk *chunks[UNWIND_CHUNKS];
	struct unwind_process process;
	struct unwind_memo memo;
	struct pt_regs registers;
	struct mm_struct___unwind mm;
	u64 fs_base;
	u64 stops[STOP_MAX];
	u64 steps;
	struct task_struct *task;
	reader reader;
	u32 reads;
	int whole_pages;
} of;

void use_reader(reader it)
{
	of.reader = it;
}

/* Have pages readable as a whole, as they are: what was not recorded of them is marked by its bytes. */
void use_whole_pages(int on)
{
	of.whole_pages = on;
}

u32 reads_of_memory(void)
{
	return of.reads;
}

void forget_all(void)
{
	for (u32 i = 0; i < UNWIND_CHUNKS; i++)
		free(of.chunks[i]);
	memset(&of, 0, sizeof(of));
}

/* Registers in the order of pt_regs, then the thread's base. */
void set_registers(const u64 *values)
{
	memcpy(&of.registers, values, sizeof(of.registers));
	of.fs_base = values[sizeof(of.registers) / 8];
}

/* An older recording may be shorter: it ends before the fields that were added since. */
void set_process(const void *raw, u32 size)
{
	memcpy(&of.process, raw, size < sizeof(of.process) ? size : sizeof(of.process));
	of.mm.start_code = of.process.start_code;
}

/* The bytes stay the caller's. */
int add_memory(u64 from, u64 size, const u8 *bytes)
{
	if (of.pieces == MAX_PIECES_OF_MEMORY)
		return -1;
	of.memory[of.pieces].from = from;
	of.memory[of.pieces].size = size;
	of.memory[of.pieces++].bytes = bytes;
	return 0;
}

int add_words(u32 reference, u32 count, const u32 *words)
{
	u32 number = reference >> 16, at = reference & 0xffff;

	if (number >= UNWIND_CHUNKS || at + count > UNWIND_CHUNK_WORDS)
		return -1;
	if (!of.chunks[number])
		of.chunks[number] = calloc(1, sizeof(*of.chunks[number]));
	if (!of.chunks[number])
		return -1;
	memcpy(&of.chunks[number]->words[at], words, 4UL * count);
	return 0;
}

void *bpf_map_lookup_elem(void *map, const void *key)
{
	u32 number = *(const u32 *)key;

	if (map == &unwind_processes)
		return number == of.process.tgid ? &of.process : NULL;
	if (map == &unwind_chunks)
		return number < UNWIND_CHUNKS ? of.chunks[number] : NULL;
	if (map == &unwind_stops)
		return number < STOP_MAX ? &of.stops[number] : NULL;
	if (map == &unwind_memo)
		return &of.memo;
	if (map == &unwind_cost)
		return NULL;
	return map; /* a chunk: an array of one */
}

long bpf_map_update_elem(void *map, const void *key, const void *value, u64 flags)
{
	return 0;
}

long bpf_loop(u32 count, long (*step)(u32, void *), void *context, u64 flags)
{
	u32 i = 0;

	while (i < count && !step(i, context))
		i++;
	of.steps = i;
	return i;
}

static long read_pages(u64 at, u32 size, u8 *to)
{
	for (u64 page = at >> 12; page <= (at + size - 1) >> 12; page++) {
		u32 i = 0;

		while (i < of.pieces && (page < of.memory[i].from >> 12 ||
					 page > (of.memory[i].from + of.memory[i].size - 1) >> 12))
			i++;
		if (i == of.pieces)
			return -14;
	}
	memset(to, NOT_RECORDED, size);
	for (u32 i = 0; i < of.pieces; i++)
		for (u64 k = 0; k < size; k++)
			if (at + k - of.memory[i].from < of.memory[i].size)
				to[k] = of.memory[i].bytes[at + k - of.memory[i].from];
	return 0;
}

long bpf_probe_read_user(void *to, u32 size, const void *from)
{
	u64 at = (u64)from;

	of.reads++;
	if (of.whole_pages)
		return read_pages(at, size, to);
	for (u32 i = 0; i < of.pieces; i++) {
		u64 inside = at - of.memory[i].from;

		if (at >= of.memory[i].from && inside <= of.memory[i].size &&
		    of.memory[i].size - inside >= size) {
			memcpy(to, of.memory[i].bytes + inside, size);
			return 0;
		}
	}
	return of.reader ? of.reader(at, size, to) : -14;
}

long bpf_get_stack(void *context, void *to, u32 size, u64 flags)
{
	return -14;
}

u64 bpf_ktime_get_ns(void)
{
	return 0;
}

u64 bpf_task_pt_regs(struct task_struct *task)
{
	return (u64)&of.registers;
}

u64 bpf_get_current_task(void)
{
	return (u64)of.task;
}

/*
 * Walk. Returns how many words the stack has, at most `most` of which are written; `result`: why it
 * ended, how many steps it took, and how often each thing was counted.
 */
u32 walk(u64 *words, u32 most, u64 *result)
{
	/* The walker sees one task by two structs; what it reads of either does not overlap. */
	union {
		struct task_struct task;
		struct task_struct___unwind more;
	} both = {};
	static struct unwind_walk w;
	u32 count = 0;

	of.task = &both.task;
	both.more.mm = &of.mm;
	both.more.thread.fsbase = of.fs_base;
	both.task.tgid = of.process.tgid;
	memset(of.stops, 0, sizeof(of.stops));
	memset(&w, 0, sizeof(w));
	of.steps = of.reads = 0;
	unwind(NULL, &w, &both.task, 0);
	for (u32 piece = 0; piece <= w.piece && piece < UNWIND_PIECES; piece++) {
		u32 slots = piece == w.piece ? w.slot : SONDE_USER_FRAMES;

		for (u32 slot = 0; slot < slots; slot++, count++)
			if (count < most)
				words[count] = w.pieces[piece].user[slot];
	}
	result[0] = w.stop;
	result[1] = of.steps;
	memcpy(result + 2, of.stops, sizeof(of.stops));
	return count;
}
