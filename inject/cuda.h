/* SPDX-License-Identifier: Apache-2.0 */
/* What cuda.c and cuda_pool.c share. */
#ifndef SONDE_CUDA_H
#define SONDE_CUDA_H

#include "driver.h"
#include "own.h"

#pragma GCC visibility push(hidden)

struct driver {
#define FIELD(name, arguments) cu_result(*name) arguments;
	DRIVER_FUNCTIONS(FIELD)
	DRIVER_OPTIONAL(FIELD)
	cu_result(*cuLaunchKernel) LAUNCH_PARAMETERS;
};
extern struct driver driver;

enum sample_state { SAMPLE_FREE, SAMPLE_TAKEN, SAMPLE_QUEUED };

/* What the gate kernel and the host tell each other, in pinned memory. */
struct gate_word {
	volatile uint32_t open;	 /* host: the pair is whole */
	volatile uint32_t tired; /* device: did not wait any longer */
};

struct sample {
	_Atomic uint32_t state;
	bool gated;
	cu_event begin, end;
	struct gate_word *gate;
	struct inject_record record;
	struct frames frames;
};

enum gating { GATE_NONE, GATE_WANTED, GATE_READY };

#define POOL_SAMPLES 256
struct pool {
	cu_context context;
	int device;
	cu_function gate, nothing;
	uint32_t bias_ns, bias_ungated_ns;
	/* enum gating. Kernels of ours are launched only where the program launches some itself: on an
	 * H200 a program that only replayed graphs ran 19 % slower for ever after its first plain kernel. */
	_Atomic uint32_t gating;
	_Atomic uint32_t next, failed;
	struct sample samples[POOL_SAMPLES];
};

/* The context's pool, or NULL: then our thread is asked to make one. */
struct pool *pool_of(cu_context context);
struct sample *pool_take(struct pool *pool);
/* A kernel is about to be launched: may it be timed yet? If not, our thread makes the gate. */
bool pool_gated(struct pool *pool);
void pool_give_back(struct sample *sample);
/* Enqueue the gate, if there is one, and the first event; false: nothing was enqueued. */
bool pair_begin(struct pool *pool, struct sample *sample, cu_stream stream);
/* Enqueue the second one and open the gate. */
void pair_end(struct sample *sample, cu_stream stream, bool launched);
void pools_turn(uint64_t now);
bool pools_pending(void);
/* In a forked child: the parent's contexts and events are none there. */
void pools_forget(void);

#pragma GCC visibility pop
#endif
