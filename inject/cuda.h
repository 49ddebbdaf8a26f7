/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files that time launches of CUDA. */
#ifndef SONDE_CUDA_H
#define SONDE_CUDA_H

#include "driver.h"
#include "internal.h"

#pragma GCC visibility push(hidden)

struct driver {
#define FIELD(name, arguments) cu_result(*name) arguments;
	DRIVER_FUNCTIONS(FIELD)
	DRIVER_OPTIONAL(FIELD)
	cu_result(*cuLaunchKernel) LAUNCH_PARAMETERS;
};
extern struct driver driver;

/* TAKEN: by the thread that launches; QUEUED: both events are in the stream, our thread reads them. */
enum sample_state { SAMPLE_FREE, SAMPLE_TAKEN, SAMPLE_QUEUED };

/* What the gate kernel and the host exchange, in pinned memory. */
struct gate_state {
	volatile uint32_t open;	     /* host: the pair is whole */
	volatile uint32_t timed_out; /* device: the delay ended before the pair was whole */
};

/* A pair of events, and the record of the launch that it is around. */
struct sample {
	_Atomic uint32_t state;
	bool gated;    /* its gate kernel was launched */
	bool unproved; /* a kernel without a gate; used only if `behind` */
	bool behind;   /* when it was whole the device was busy with other work */
	cu_event begin, end;
	_Atomic(cu_stream) key; /* of the stream it is in (key_of) */
	_Atomic uint64_t use;	/* the launch's correlation: another at each use of this struct */
	struct sample *before;	/* in the same stream when this one was begun, or NULL */
	uint64_t before_use;
	struct gate_state *gate;
	struct inject_record record;
	struct frames frames;
};

/* Whether kernels of this context are timed behind a gate. */
enum gating { GATE_NONE, GATE_WANTED, GATE_READY };

/* The bias of a pair until it is measured: 2.2 to 3.2 us in nine processes on an H200. */
#define PAIR_NS 2500
#define BIAS_TRIALS 21
#define MOST_BIAS_TRIALS 210 /* gates that ended too early among them */
#define POOL_SAMPLES 256     /* pairs in flight in one context; two events each */
#define STREAMS_BEFORE 8     /* streams of a context whose last pair is remembered */
/* A pair around an empty kernel: one at a time. It is free between GATE_READY and the last trial. */
struct calibration {
	_Atomic uint32_t state; /* enum sample_state */
	cu_event begin, end;
	const struct gate_state *gate;
	uint32_t tries, count, found[BIAS_TRIALS]; /* ns */
};

struct pool {
	cu_context context;
	unsigned long long id; /* the context's, 0: unknown */
	int device;
	cu_function gate, nothing; /* the gate kernel, and an empty one */
	uint32_t bias_ns;	   /* of a pair that holds no time of the host */
	struct calibration calibration;
	/* enum gating. Kernels of ours are launched only where the program launches some itself, by its own
	 * threads, in its own streams: on an H200 a program that only replayed graphs ran 19 % slower, and one that
	 * decodes 15 %, ever after our thread had launched some into a stream that it had made. And where its device is
	 * not always behind: there a pair needs no gate, and loading its module into a driver whose queue is full
	 * took seconds, and held the program's next launch up as long. */
	_Atomic uint32_t gating;
	/* A score: how often pairs of kernels without a gate may hold time of the host (was_behind). */
	_Atomic uint32_t without;
	struct sample *_Atomic before[STREAMS_BEFORE]; /* the last pairs in some streams */
	_Atomic uint32_t next;	  /* where the search for a free sample begins */
	_Atomic uint32_t failed;  /* for good */
	_Atomic uint32_t refused; /* events in a row that the driver did not record */
	/* Its context was taken away, and every event with it, or it could not be made whole: nothing here is
	 * touched again. */
	_Atomic uint32_t gone;
	struct sample samples[POOL_SAMPLES];
};

/* ---- cuda_pool.c ---- */

/* The pool of the thread's current context, or NULL: then our thread is asked to make one, unless *for_good, where it
 * failed. */
struct pool *pool_here(bool *for_good);
/* A free pair; NULL: none was found. */
struct sample *pool_take(struct pool *pool);
/* A kernel is about to be launched: is there a gate for it? */
bool pool_gated(struct pool *pool);
void pool_give_back(struct sample *sample);

/* ---- cuda_pair.c ---- */

/* Enqueue the gate, if there is one and `gated`, and the first event; false: there is no first event. */
bool pair_begin(struct pool *pool, struct sample *sample, cu_stream stream, bool gated);
/* Enqueue the second event and open the gate. */
void pair_end(struct pool *pool, struct sample *sample, cu_stream stream, bool launched);
/* By our thread, in a step: if the device has passed the pair, put its record, and give the sample back. */
void pair_read(struct pool *pool, struct sample *sample);

/* ---- cuda_gate.c ---- */

/* By our thread, in a step: load the gate kernel, if the driver takes it. */
void gate_make(struct pool *pool);
/* In a thread of the program, behind its launch, before the gate opens: a trial of the bias, if one is wanted. */
void bias_enqueue(struct pool *pool, const struct sample *behind, cu_stream stream);
/* By our thread, in a step: if the device has passed the trial, keep it; after the last one the bias is known. */
void bias_read(struct pool *pool);

/* ---- cuda_pool.c, by our thread ---- */

/* In a step. */
void pools_poll(void);
bool pools_pending(void);
/* In a forked child, and where the driver was unloaded: no context or event is there any more. */
void pools_forget(void);
/* Between steps_stop and steps_resume: those of this context, of this device, or all, are gone. */
void pools_of_context_gone(cu_context context);
void pools_of_device_gone(int device);
void pools_gone(void);
/* The context that a pool was asked for may be the one that is gone: make none. */
void pools_nothing_wanted(void);

/* ---- profilers.c ---- */

/* Another tool traces kernels or copies: nothing of ours may go into a stream. */
bool cuda_yields(void);
struct hook_list profiler_hooks(void);
/* Find CUPTI. True: it was loaded since the last call, so slots that were scanned before may lead to it. */
bool profilers_found(void);
/* Our hooks are taken out, or this is a forked child: from now on it is not seen what others switch off. */
void profilers_forget(void);

/* ---- cuda_launches.c: one call between the events of a pair ---- */

struct launch {
	struct section *section;
	struct pool *pool;
	struct sample *sample;
	cu_stream stream;
	uint64_t begun_ns, own_ns; /* own: how long we took until the program's call began */
	bool gated;		   /* a gate is wanted: so not for copies and sets */
};

/* Is this call to be timed? Then l->sample is its pair, whose record the caller completes. `per_thread`: a NULL stream
 * is the thread's default one. */
bool launch_begin(struct launch *l, enum inject_type type, cu_stream stream, bool per_thread,
		  void *frame, void *caller);
/* Enqueue the first event; false: that failed, and the launch goes untimed. */
bool launch_begin_pair(struct launch *l);
void launch_end(struct launch *l, cu_result launched);

/* ---- cuda_sections.c ---- */

/* A thread between its search for a pool and the end of its pair. */
struct section {
	_Atomic uint32_t tid; /* 0: free */
	_Atomic uint64_t since_ns;
	struct sample *_Atomic sample; /* that it has taken */
};
/* NULL: all are taken. */
struct section *section_enter(void);
void section_leave(struct section *section);
/* Is any thread in a section? */
bool launches_under_way(void);
/* Wait until no thread is, for 50 ms at most. */
void launches_wait_out(void);
/* By our own thread: free the sections of threads that ended in one. */
void sections_poll(void);
/* In a forked child. */
void sections_forget(void);

/*
 * A hook: two functions, so that the common path keeps nothing on the stack and ends in a jump to the real function.
 * DESCRIBE completes the record. Its table entry is ENTRY.
 */
#define HOOK(NAME, TYPE, PER_THREAD, PARAMETERS, VALUES, STREAM, DESCRIBE)                         \
	static cu_result(*real_##NAME) PARAMETERS;                                                 \
	static __attribute__((noinline)) cu_result timed_##NAME PARAMETERS                         \
	{                                                                                          \
		struct launch l;                                                                   \
		if (!launch_begin(&l, TYPE, STREAM, PER_THREAD, __builtin_frame_address(0),        \
				  __builtin_return_address(0)))                                    \
			return REAL(NAME) VALUES;                                                  \
		DESCRIBE;                                                                          \
		if (!launch_begin_pair(&l))                                                        \
			return REAL(NAME) VALUES;                                                  \
		cu_result result = REAL(NAME) VALUES;                                              \
		launch_end(&l, result);                                                            \
		return result;                                                                     \
	}                                                                                          \
	static cu_result hook_##NAME PARAMETERS                                                    \
	{                                                                                          \
		if (likely(sampling_skips(TYPE)))                                                  \
			return REAL(NAME) VALUES;                                                  \
		return timed_##NAME VALUES;                                                        \
	}
#define ENTRY(NAME) {#NAME, (void *)hook_##NAME, (void **)&real_##NAME, NULL},

/* What each file hooks. */
struct hook_list {
	const struct hook *table;
	unsigned count;
};
struct hook_list launch_hooks(void);
typedef cu_result(*launch_kernel_fn) LAUNCH_PARAMETERS;
/* The driver's cuLaunchKernel itself; NULL: not found yet. */
launch_kernel_fn real_launch_kernel(void);
/* In a forked child: no stream is being captured there. */
void captures_forget(void);
struct hook_list copy_hooks(void);
/* By our thread: put the records of calls that waited and have returned. */
void cuda_waits_poll(void);
bool cuda_waits_pending(void);
void cuda_waits_forget(void);
struct hook_list context_hooks(void);

#pragma GCC visibility pop
#endif
