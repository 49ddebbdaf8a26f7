/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The state of a walk, and the maps that walks go by (abi/unwind.h); unwind.bpf.c owns them. */
#ifndef SONDE_UNWIND_STATE_H
#define SONDE_UNWIND_STATE_H

#include "../abi/unwind.h"

#define UNWIND_PIECES 8	 /* of SONDE_USER_FRAMES words; a power of 2 */
#define UNWIND_SIGNALS 4 /* frames of signal handlers on one stack */

#define PYTHON_FRAME_BYTES 112 /* of a frame: all fields that are read lie in these */
#define PYTHON_CODES 16	       /* code objects whose line is kept during a walk; a power of 2 */
#define ABSENT 0xffff	       /* an offset: this build has no such field */

/* Keeps the structs in the object's BTF, where user space reads their size. */
const struct unwind_chunk *unwind_chunk_layout __attribute__((unused));
const struct unwind_process *unwind_process_layout __attribute__((unused));

struct unwind_chunk_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* Sizes, no types: up to 6.1 a map with types is not equal to one that user space makes without,
	 * and only equal ones are let into the map of maps. */
	__uint(key_size, sizeof(u32));
	__uint(value_size, sizeof(struct unwind_chunk));
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

/* Processes without an entry, or with a stale one, and how many walks met them so: user space reads and
 * empties it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, UNWIND_PROCESSES);
	__type(key, u32);
	__type(value, u32);
} unwind_wanted SEC(".maps");

/* Pages of tables that a walk needed and that are not loaded yet: references of their entries in `pages`. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, UNWIND_PAGES_WANTED);
	__type(key, u32);
	__type(value, u32);
} unwind_pages SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STOP_MAX);
	__type(key, u32);
	__type(value, u64);
} unwind_stops SEC(".maps");

/*
 * Rules found lately, by a hash of the code's address and of the epoch of its process: the same few hundred
 * addresses come again with every sample, and each look-up in the tables misses the CPU's cache a dozen times.
 * Walks that interrupt one another may write the same entry, so it has a checksum: a torn one is not found.
 */
#define UNWIND_MEMO_BITS 10
struct unwind_recalled {
	u64 check; /* hash ^ rule[0] ^ rule[1] rotated by 32 bits */
	u64 rule[2];
};
struct unwind_memo {
	struct unwind_recalled at[1 << UNWIND_MEMO_BITS];
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct unwind_memo);
} unwind_memo SEC(".maps");

/* A histogram of the time of walks of cost_words or more words: in steps of 250 ns, the last for all longer. */
#define COST_STEPS 256
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COST_STEPS);
	__type(key, u32);
	__type(value, u64);
} unwind_cost SEC(".maps");

/* Steps of a walk at most (frames of all kinds): bounds its time. */
const volatile u32 unwind_steps = 1200;
const volatile bool unwind_by_tables = true; /* false: as on kernels that have no bpf_loop */
const volatile u32 cost_words = 0;	     /* 0: do not measure */

/* Makes clang forget what it knows of a number, so that it keeps checks that the verifier needs. */
#define OPAQUE(x) asm volatile("" : "+r"(x))

/*
 * A part of a walk. The verifier follows a static function again from every state that it is called in, a global
 * one once in each program, with nothing known of its arguments but their size: so all large parts are global,
 * check `w`, and take as `task` a number. With SONDE_READS_OTHERS the task is a pointer that the verifier
 * has to know, which no global function can take (before Linux 6.9).
 */
#ifdef SONDE_READS_OTHERS
#define WALK_PART static __noinline
typedef struct task_struct *walked_task;

#include "other_memory.h"

static __always_inline walked_task walked(struct task_struct *task)
{
	return task;
}
#else
#define WALK_PART __weak __noinline
typedef u64 walked_task; /* its address: the current one */

static __always_inline walked_task walked(struct task_struct *task)
{
	return bpf_get_current_task();
}

/* Reads memory of `task`, which is the current one. Not 0: it cannot be read. */
static __always_inline long read_user(walked_task task, void *to, u32 size, u64 from)
{
	return bpf_probe_read_user(to, size, (void *)from);
}
#endif

#include "unwind_window.h"

/* The state of a walk: large, so it lies in a map. */
struct unwind_walk {
	u64 pc;
	u64 sp;
	u64 bp;
	u64 registers[16]; /* of the first frame, by DWARF's numbers */
	u64 next_frame;	   /* of an interpreter */
	u64 frames_end;	   /* where the memory of Ruby's frames ends */
	u64 thread_base;   /* fs */
	u64 entering;	   /* the _PyCFrame of an evaluation loop just being entered; 0: none */
	struct unwind_process process;
	struct unwind_range range; /* the one found last */
	u32 has_range;
	u32 is_return; /* pc is behind a call */
	u32 is_first;
	u32 in_loop;	   /* the next frame is one that an evaluation loop runs */
	u32 next_known;	   /* next_frame holds the next one */
	u32 loop_before;   /* the frame before ran for a loop (CFA_LOOP): its frames come next */
	u32 is_rest;	   /* frames that no loop has taken: 0, REST_UNMARKED or REST_MARKED */
	u32 in_first_loop; /* the loop is the first frame of all */
	u32 signals;	   /* frames of signal handlers so far */
	u32 stop;
	u32 piece;
	u32 slot;
	u32 low; /* bounds of a search; in a map: the verifier does not follow their values */
	u32 high;
	u64 codes[PYTHON_CODES]; /* met on this walk, each with its first line */
	u32 lines[PYTHON_CODES];
	struct unwind_window stack;
	struct unwind_window frames; /* of an interpreter */
	struct unwind_window values; /* Ruby's flags of frames */
	struct sonde_stack pieces[UNWIND_PIECES];
};

static __always_inline void count_stop(u32 why)
{
	u64 *n = bpf_map_lookup_elem(&unwind_stops, &why);

	if (n)
		(*n)++;
}

/* Asks user space to load a process's mappings and tables (again). */
static __always_inline void want(u32 tgid)
{
	const u32 one = 1;
	u32 *walks = bpf_map_lookup_elem(&unwind_wanted, &tgid);

	if (walks)
		(*walks)++;
	else
		bpf_map_update_elem(&unwind_wanted, &tgid, &one, BPF_ANY);
}

/* Asks user space to load a page of a table. */
static __always_inline void want_page(u32 reference)
{
	const u32 one = 1;

	bpf_map_update_elem(&unwind_pages, &reference, &one, BPF_ANY);
}

static __always_inline void count_cost(u64 began_ns)
{
	u64 steps = (bpf_ktime_get_ns() - began_ns) / 250, *n;
	u32 step = steps < COST_STEPS ? steps : COST_STEPS - 1;

	n = bpf_map_lookup_elem(&unwind_cost, &step);
	if (n)
		(*n)++;
}

/* Adds a word to the stack; false, with w->stop, where there is no more room. */
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

/* Reads the word of the stack at `at`. Not 0: it cannot be read. */
static __always_inline long on_stack(struct unwind_walk *w, walked_task task, u64 *to, u64 at)
{
	return read_stack(&w->stack, task, w->sp, to, at);
}

/* The argument of unwind_step; on the program's own stack, where the verifier knows pointers as such. */
struct unwind_context {
	struct unwind_walk *walk;
	walked_task task; /* whose stack it is: the current one, unless SONDE_READS_OTHERS */
	struct unwind_memo *memo;
};

#endif
