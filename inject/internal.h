/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the library share. It lives in somebody else's process: nothing here prints,
 * allocates from the host's heap, waits for a lock of the host's, or stops the host for what fails.
 *
 * Terms:
 * - host: the profiled program; our thread: the one that the library runs in it
 * - hook: our function in place of a real one; to stand in, pass on: to be called in its place, to call it; armed: a
 *   hook that does more than pass on
 * - slot: a pointer in a module's data (such as an entry of the GOT) through which the program calls a device library
 * - ring, record: shared memory that the agent reads, and an entry of it; frames: a stack that goes with a record
 * - sample: a launch that is chosen to be timed; weight: how many launches it stands for; stride: one in this many
 *   launches is chosen; to carry: to give the weight of one that could not be timed to the next; token: the
 *   permission to time one launch, handed out at a rate; draw: which launch is next (sampling.c)
 * - heartbeat: a time that the agent writes every 250 ms; without it nothing is timed (abi/inject.h)
 * - scan: a search of the modules' data for slots; in, out: hooks are put into slots, or the real functions back
 * - pair: two events around a launch; pool: the pairs of a context; section: a thread's stay in a launch that is timed
 * - to forget: to drop state without giving it back, as in a forked child, where it is not this process's
 * - gate: a kernel that holds a stream until the launch that is timed has arrived behind it
 * - step: a stretch in which a thread of ours is in a device library (steps.c)
 * - window: a stretch in which CUPTI records every kernel; trace: what it recorded; replay: a launch of a CUDA graph
 * - self_sampling: what the calling thread knows of the sampling
 * - generation: of modules: changes with the loaded ones; of the memory: 1, and one more in each forked child
 * - whole: of a pair: both of its events are in the stream; behind: the device had other work then; bias: what
 *   a pair takes by itself, measured and taken off; unproved: of a pair, without a gate
 * - to keep records, held: to store what CUPTI hands over; buffers that CUPTI still has
 * - set: a fill (memset); foreign: of a buffer, that another tool has given to CUPTI; memory, in records: the kinds
 *   of memory (pageable, pinned, device, …) that a copy is from and to
 */
#ifndef SONDE_INTERNAL_H
#define SONDE_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "../abi/inject.h"

// The library must load with any glibc since 2.17. So these functions have their oldest symbol version, not the one
// that the glibc of the building machine has as its default.
#ifdef __x86_64__
#define OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
OLD(pthread_attr_getstack);
OLD(pthread_attr_setstacksize);
OLD(pthread_create);
OLD(pthread_getattr_np);
OLD(pthread_mutex_trylock);
OLD(pthread_sigmask);
#undef OLD
#endif

#pragma GCC visibility push(hidden)

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

static inline uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- shared.c: the memory that the agent reads ---- */

struct shared {
	struct inject_header *header;
	struct inject_control *control;
	struct inject_state *state;
	struct inject_record *ring;
	char *names;
	struct inject_function *functions;
	const struct inject_slot *slots;
};
extern struct shared shared;

bool shared_create(uint32_t generation); /* of inject_header */
/* In a forked child: unmap the parent's memory. */
void shared_forget(void);
/* Sealed memory of this name and size, mapped, and its descriptor, by which agents without privileges find it;
 * NULL: none. */
char *shared_memory(const char *name, size_t bytes, int *descriptor);
/* By our own thread alone. False: no room, counted. */
bool shared_put(struct inject_record *record);
/* By any thread: the offset of a name that is there, or added now. 0: an empty one, or no room, counted. */
uint32_t shared_name(const char *text);
#define COUNT(field, n) __atomic_fetch_add(&shared.state->field, (uint64_t)(n), __ATOMIC_RELAXED)
#define SET(field, value) __atomic_store_n(&shared.state->field, (value), __ATOMIC_RELAXED)

/* ---- modules.c: what is loaded, by the dynamic linker's own list ---- */

/* A function that we stand in for. `ours` forwards to `real`. */
struct hook {
	const char *name;
	void *ours;
	void **real;
	const char *module; /* that defines it; NULL: the device's own library */
};

/* Written once by our thread, before any slot leads to us. */
#define REAL(NAME) __atomic_load_n(&real_##NAME, __ATOMIC_RELAXED)

/* All hooks of one backend. */
struct hooks {
	struct hook *table;
	unsigned count;
	unsigned number;	 /* of the backend: 0 CUDA, 1 OpenCL */
	const char *const *skip; /* parts of names of modules whose slots are left as they are */
};

/* The function that the first module whose file name begins with `module` defines, or NULL. */
void *module_symbol(const char *module, const char *name);
/* The path of that module; false: there is none, or `size` is too small for it. */
bool module_path(const char *module, char *path, size_t size);
/* A number that changes whenever a module is loaded or unloaded. */
uint64_t modules_generation(void);
/* Held while the loader's list is walked, so that no fork happens then. */
extern pthread_mutex_t modules_walking;
/* Is the memory of another copy of this library mapped here? */
bool other_copy_is_here(void);

/* ---- pointer_scan.c: slots in modules' data through which they call device libraries ---- */

/* A scan begins, with a new budget of bytes and CPU time; `large`: 16 times the usual one. */
void scan_begin(bool large);
/* Put our functions where slots in writable data hold the real ones, or, with `in` false, put the real ones
 * back. `only_new`: read what was not read since the last call without it. Returns how many of the slots that were
 * read lead to us. */
unsigned hooks_apply(const struct hooks *hooks, bool in, bool only_new);
/* Whether the budget ended before all was read: the rest is for the next scan, with only_new. */
bool scan_end(void);
/* Store `value` in this slot, if it still holds `before`; under the loader's lock, while its module is there.
 * `relro_start`, `relro_end`: its module's data that is read-only after relocation; it is made writable for that. */
bool pointer_store(void **slot, void *before, void *value, uintptr_t relro_start,
		   uintptr_t relro_end);

/* ---- slots.c: the same slots, as the agent found them from outside ---- */

#define MOST_LISTS 2 /* one of each backend */
/* Publish for the agent which functions these stand in for; a list may be NULL. */
void slots_publish(const struct hooks *const lists[MOST_LISTS]);
/* Put hooks into the slots of the agent's list, if there is a new one. */
void slots_take(const struct hooks *const lists[MOST_LISTS]);
/* Modules were loaded or unloaded: forget slots of those that are gone. */
void slots_recheck(void);
/* How many slots lead to us because of the agent's lists. */
unsigned slots_placed(void);
/* Put the real functions back into all of them. */
void slots_put_back(void);

/* ---- sampling.c: which launches are timed ---- */

#define ARMED 1
#define ARMED_AGAIN 2 /* in a forked child: the next launch starts again */

/* In memory that a fork wipes: in a child every hook passes on at once. */
struct sampling {
	_Atomic uint32_t armed;	 /* 0, ARMED or ARMED_AGAIN */
	_Atomic uint32_t stride; /* one in this many launches of a type in one thread; 0: none */
	_Atomic uint32_t epoch;	 /* one more whenever the stride is another */
	_Atomic int32_t tokens;	 /* launches that may be timed until our thread refills them */
	_Atomic uint32_t traced; /* CUPTI's records are kept */
	_Atomic uint64_t seen;	 /* launches of all types, added up to 256 at a time (LOOK_EVERY) */
	/* By type: what chosen launches that could not be timed stood for. The next of their type that
	 * is timed stands for it too, so that sums of weights stay those of all launches. */
	_Atomic uint64_t carried[INJECT_TYPES];
};
extern struct sampling *sampling;
bool sampling_create(void);

#define SAMPLED_TYPES (INJECT_SYNC + 1)

/* Which launch of one type is the next one to be timed in one thread: after `left` + `rest` more. */
struct draw {
	uint16_t left;	 /* a countdown; at its end launches are added to `seen`, `rest` is read */
	uint16_t looked; /* what `left` was when the countdown began */
	uint32_t rest;	 /* launches after these until the one to time */
	uint32_t after;	 /* launches behind it in its block of `drawn`, of which it is the one */
};

/* Thread-local memory is scarce where a library is loaded by dlopen: some 100 bytes, no more. */
struct thread_sampling {
	struct draw of[SAMPLED_TYPES];
	uint32_t drawn;	 /* the stride that these were drawn with: their weight */
	uint32_t epoch;	 /* of that stride */
	uint64_t random; /* state of the generator, 0: not begun */
	uint32_t tid;
	uint32_t busy;			/* inside a hook: calls that it makes pass on */
	uintptr_t stack_low, stack_end; /* 0, 0: not looked up yet; 1, 1: unknown */
};
extern __thread struct thread_sampling self_sampling __attribute__((tls_model("initial-exec")));

/* Whether this launch is to be timed: once in each `stride` launches of a type; *weight is how many it stands for.
 * False, and carried, where it is chosen and no token is left. */
bool sampling_due(enum inject_type type, uint32_t *weight);
/* A launch that was chosen could not be timed: the next timed one of its type gets its weight. */
void sampling_carry(unsigned type, double weight);
/* Count the host's time that a timed launch took because of us. */
void sampling_cost(uint64_t ns);
/* Put the record of something that was timed, with what is carried; or carry it, if there is no room. */
void sampling_put(struct inject_record *record);
/* By our thread: new tokens, and a stride that fits the rate of launches. */
void sampling_refill(uint64_t now);
/* By our thread, once nothing is armed: the rate of launches is not updated until the next refill. */
void sampling_rest(void);
void sampling_forget(void);
/* The common path of each hook: true where the launch is not to be timed. */
static inline bool sampling_skips(enum inject_type type)
{
	if (likely(!atomic_load_explicit(&sampling->armed, memory_order_relaxed)))
		return true;
	// A new stride takes effect at once: a thread that launches seldom would finish the old one minutes later.
	if (likely(self_sampling.of[type].left > 1 &&
		   self_sampling.epoch ==
			   atomic_load_explicit(&sampling->epoch, memory_order_relaxed))) {
		self_sampling.of[type].left--;
		return true;
	}
	return false;
}

/* ---- stacks.c ---- */

#define MAX_FRAMES 120 /* ten records of INJECT_FRAMES_EACH */
struct frames {
	uint32_t count;
	uint64_t address[MAX_FRAMES];
};
static inline void frames_copy(struct frames *to, const struct frames *from)
{
	to->count = from->count;
	for (uint32_t k = 0; k < from->count; k++)
		to->address[k] = from->address[k];
}
/* Fill `to` by frame pointers, from the calling thread's `frame` on; `caller`: its return address. */
void frames_walk(struct frames *to, void *frame, uint64_t caller);
/* Put a stack into the ring, before the record of the launch that it goes with. */
void frames_put(const struct frames *frames, uint64_t correlation, uint32_t tid);

/* ---- backends.c: the device libraries whose launches are timed ---- */

/* Called by our own thread; `pending` also by the thread that exits the process. */
struct backend {
	uint32_t requests; /* bits of inject_control.request that ask for it */
	/* Find the library. INJECT_OK: its functions are known. */
	enum inject_reason (*begin)(void);
	/* Search the modules for slots, and put hooks in or out: hooks_apply. */
	unsigned (*hook)(bool in, bool only_new);
	/* What is hooked; NULL: the library is not there, or its loader (OpenCL's ICD loader) calls us. */
	const struct hooks *(*hooks)(void);
	/* How many hooks that loader calls; may be NULL. */
	unsigned (*by_loader)(void);
	/* The hooks were taken out of all slots; may be NULL. */
	void (*unhooked)(void);
	/* Make the pools that launches wait for, read the pairs that the device has passed. */
	void (*poll)(void);
	/* A timed launch was enqueued and is not read yet. */
	bool (*pending)(void);
	/* Another tool traces: nothing of ours may go into a stream; may be NULL. */
	bool (*yields)(void);
	/* In a forked child, before anything else: nothing of the parent's is under way there. */
	void (*forget)(void);
};
extern const struct backend cuda_backend, opencl_backend;

/* Find the libraries that `request` asks for. INJECT_OK: at least one is there. */
enum inject_reason backends_begin(uint32_t request);
/* The same functions of all backends; numbers are added up. */
unsigned backends_hook(bool in, bool only_new);
/* Of each backend, in an order that does not change. */
void backends_hooks(const struct hooks *lists[MOST_LISTS]);
unsigned backends_by_loader(void);
void backends_unhooked(void);
/* `timing` false: only those where something is pending. */
void backends_poll(bool timing);
bool backends_pending(void);
bool backends_yield(void);
void backends_forget(void);

/* ---- opencl.c ---- */

/* Put our hooks into the loader's table of `count` functions (struct _cl_icd_dispatch of CL/cl_icd.h). False: it lacks
 * a function that is needed. */
bool opencl_stand_between(void **entries, unsigned count);

/* ---- thread.c: the library's one thread ---- */

/* The next launch's number in this process. */
uint64_t next_correlation(void);
bool thread_start(void);
/* The process exits: read what has happened, for LAST_POLL_NS at most, then stay out of device libraries. */
void thread_end(void);
/* From now on hooks choose launches to be timed, or only pass on. */
void arm(bool on);
void nap(uint64_t ns); /* sleep, and leave errno; no cancellation point */

/* ---- trace.c: for a while, every kernel, copy and call of the process, recorded by CUPTI ---- */

/* By our thread: begin the window of this number, for `us` microseconds, if it is new; `window` 0: free the memory of
 * the last one. */
void trace_poll(uint32_t window, uint32_t us);
bool trace_is_running(void);
/* Ask the running trace to end early. */
void trace_end(void);
/* Another user of CUPTI is about to call it: end the trace, and wait until that is done, for 2 s at most. */
void trace_step_aside(void);
/* In a forked child. */
void trace_forget(void);

/* ---- start.c: the start, forks, the exit ---- */

void start_again_after_fork(void);
/* Register handlers that run around forks. By our thread, before anything else. */
void watch_forks(void);
/* Register a handler that runs at the process's exit before those of the device library that is in use now. By the
 * thread that uses it. */
void watch_exit(void);

/* ---- steps.c ---- */

/*
 * Steps of our threads in device libraries. They take none while a host thread takes a context away or once
 * the process exits: both wait until the step under way is over, for STEP_WAIT_NS at most.
 */
bool step_begin(void); /* false: not now */
void step_end(void);
/* In a step, before each call: is somebody waiting for its end? */
bool step_is_unwanted(void);
/* Around what takes a context away: no step begins in between. Calls nest. */
void steps_stop(void);
void steps_resume(void);
/* In a forked child. */
void steps_forget(void);
/* For good: from now on no step begins; waits for the one under way. */
void steps_close(void);
bool steps_are_closed(void);
/* Wait a moment, as number `turn` of a loop: a pause instruction for the first 100, a sleep of 20 us after that. */
void short_nap(int turn);

#pragma GCC visibility pop

/* stacks.c: where an agent's uprobe takes the stack of a launch. */
void sonde_inject_site(uint64_t correlation) __attribute__((visibility("default")));
#endif
