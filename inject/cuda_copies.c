// SPDX-License-Identifier: Apache-2.0
// Copies and sets of the CUDA driver, timed like launches but without a gate: a copy that makes the host wait would
// wait for the gate, too. And calls that wait for the device, timed by the host's clock.
#include "cuda.h"

#include <string.h>

enum { COPY_H2D = 1, COPY_D2H = 2, COPY_D2D = 8, COPY_P2P = 10 }; // as CUPTI numbers them

static void describe(struct launch *l, uint64_t bytes, unsigned kind)
{
	l->gated = false;
	l->sample->record.bytes = bytes;
	l->sample->record.kind = (uint16_t)kind;
}

static unsigned kind_by_types(int from, int to)
{
	bool from_device = from == CU_MEMORY_DEVICE || from == CU_MEMORY_ARRAY;
	bool to_device = to == CU_MEMORY_DEVICE || to == CU_MEMORY_ARRAY;
	if (from == CU_MEMORY_HOST && to_device)
		return COPY_H2D;
	if (from_device && to == CU_MEMORY_HOST)
		return COPY_D2H;
	return from_device && to_device ? COPY_D2D : 0;
}

// Memory that the driver does not know is the host's. 0: this driver cannot be asked.
static int type_of(cu_pointer at)
{
	int type = 0;
	if (!driver.cuPointerGetAttribute)
		return 0;
	return driver.cuPointerGetAttribute(&type, CU_MEMORY_TYPE_OF, at) == CU_OK ? type :
										     CU_MEMORY_HOST;
}

static unsigned kind_of(cu_pointer from, cu_pointer to)
{
	return kind_by_types(type_of(from), type_of(to));
}

#define COPY(NAME, PARAMETERS, VALUES, BYTES, KIND)                                                \
	HOOK(NAME, INJECT_COPY, false, PARAMETERS, VALUES, stream, describe(&l, BYTES, KIND))      \
	HOOK(NAME##_ptsz, INJECT_COPY, true, PARAMETERS, VALUES, stream, describe(&l, BYTES, KIND))
#define SETS(NAME, PARAMETERS, BYTES)                                                              \
	HOOK(NAME, INJECT_SET, false, PARAMETERS, SET_VALUES, stream, describe(&l, BYTES, 0))      \
	HOOK(NAME##_ptsz, INJECT_SET, true, PARAMETERS, SET_VALUES, stream, describe(&l, BYTES, 0))

COPY(cuMemcpyHtoDAsync_v2, TO_DEVICE_PARAMETERS, COPY_VALUES, bytes, COPY_H2D)
COPY(cuMemcpyDtoHAsync_v2, TO_HOST_PARAMETERS, COPY_VALUES, bytes, COPY_D2H)
COPY(cuMemcpyDtoDAsync_v2, COPY_PARAMETERS, COPY_VALUES, bytes, COPY_D2D)
COPY(cuMemcpyAsync, COPY_PARAMETERS, COPY_VALUES, bytes, kind_of(from, to))
COPY(cuMemcpyPeerAsync, PEER_PARAMETERS, PEER_VALUES, bytes, COPY_P2P)
COPY(cuMemcpy2DAsync_v2, COPY_2D_PARAMETERS, COPY_2D_VALUES, copy->width_bytes * copy->height,
     kind_by_types(copy->from_type, copy->to_type))
SETS(cuMemsetD8Async, SET_8_PARAMETERS, count)
SETS(cuMemsetD16Async, SET_16_PARAMETERS, count * 2)
SETS(cuMemsetD32Async, SET_32_PARAMETERS, count * 4)

// ---- calls that wait -------------------------------------------------------------------------------

// Calls that have returned, until our thread puts their records.
enum { RETURNED_FREE, RETURNED_TAKEN, RETURNED_DONE };
#define RETURNED 64
static struct returned {
	_Atomic uint32_t state;
	struct inject_record record;
	struct frames frames;
} returned[RETURNED];
static _Atomic uint32_t next_returned;

// On the stack of the thread that waits, until its call returns: a thread that is cancelled in the driver leaves
// nothing behind.
struct wait {
	struct inject_record record;
	struct frames frames;
};

static bool wait_begin(struct wait *w, const char *name, uint64_t bytes, unsigned kind,
		       cu_stream stream, void *frame, void *caller)
{
	uint32_t weight, request = shared.control->request;
	if (self_sampling.busy || !sampling_due(INJECT_SYNC, &weight))
		return false;
	w->record = (struct inject_record){
		.type = INJECT_SYNC,
		.source = INJECT_BY_HOST,
		.name = shared_name(name),
		.correlation = next_correlation(),
		.weight = weight,
		.stream = (uint64_t)(uintptr_t)stream,
		.tid = self_sampling.tid,
		.bytes = bytes,
		.kind = (uint16_t)kind,
	};
	w->frames.count = 0;
	if (request & INJECT_STACKS)
		frames_walk(&w->frames, frame, (uintptr_t)caller);
	if (request & INJECT_SITE)
		sonde_inject_site(w->record.correlation);
	w->record.start_ns = now_ns();
	return true;
}

static cu_result wait_end(struct wait *w, cu_result result)
{
	struct returned *h = &returned[atomic_fetch_add(&next_returned, 1) % RETURNED];
	uint32_t is_free = RETURNED_FREE;
	w->record.end_ns = now_ns();
	if (!atomic_compare_exchange_strong(&h->state, &is_free, RETURNED_TAKEN)) {
		COUNT(lost_pool, 1);
		sampling_carry(INJECT_SYNC, w->record.weight);
		return result;
	}
	h->record = w->record;
	frames_copy(&h->frames, &w->frames);
	atomic_store(&h->state, RETURNED_DONE);
	return result;
}

#define WAIT(NAME, PARAMETERS, VALUES, BYTES, KIND, STREAM)                                        \
	static cu_result(*real_##NAME) PARAMETERS;                                                 \
	static __attribute__((noinline)) cu_result timed_##NAME PARAMETERS                         \
	{                                                                                          \
		struct wait w;                                                                     \
		bool timed = wait_begin(&w, #NAME, BYTES, KIND, STREAM,                            \
					__builtin_frame_address(0), __builtin_return_address(0));  \
		return timed ? wait_end(&w, REAL(NAME) VALUES) : REAL(NAME) VALUES;                \
	}                                                                                          \
	static cu_result hook_##NAME PARAMETERS                                                    \
	{                                                                                          \
		if (likely(sampling_skips(INJECT_SYNC)))                                           \
			return REAL(NAME) VALUES;                                                  \
		return timed_##NAME VALUES;                                                        \
	}

WAIT(cuStreamSynchronize, STREAM_PARAMETERS, STREAM_VALUES, 0, 0, stream)
WAIT(cuStreamSynchronize_ptsz, STREAM_PARAMETERS, STREAM_VALUES, 0, 0, stream)
WAIT(cuEventSynchronize, EVENT_PARAMETERS, EVENT_VALUES, 0, 0, NULL)
WAIT(cuCtxSynchronize, (void), (), 0, 0, NULL)
WAIT(cuMemcpyHtoD_v2, (cu_pointer to, const void *from, size_t bytes), (to, from, bytes), bytes,
     COPY_H2D, NULL)
WAIT(cuMemcpyHtoD_v2_ptds, (cu_pointer to, const void *from, size_t bytes), (to, from, bytes),
     bytes, COPY_H2D, NULL)
WAIT(cuMemcpyDtoH_v2, (void *to, cu_pointer from, size_t bytes), (to, from, bytes), bytes, COPY_D2H,
     NULL)
WAIT(cuMemcpyDtoH_v2_ptds, (void *to, cu_pointer from, size_t bytes), (to, from, bytes), bytes,
     COPY_D2H, NULL)

void cuda_waits_poll(void)
{
	for (int k = 0; k < RETURNED; k++) {
		struct returned *h = &returned[k];
		if (atomic_load(&h->state) != RETURNED_DONE)
			continue;
		if (h->frames.count)
			frames_put(&h->frames, h->record.correlation, h->record.tid);
		else
			h->record.flags |= INJECT_NO_STACK;
		sampling_put(&h->record);
		atomic_store(&h->state, RETURNED_FREE);
	}
}

bool cuda_waits_pending(void)
{
	for (int k = 0; k < RETURNED; k++)
		if (atomic_load(&returned[k].state) == RETURNED_DONE)
			return true;
	return false;
}

void cuda_waits_forget(void)
{
	memset(returned, 0, sizeof returned);
}

#define TWICE(NAME) ENTRY(NAME) ENTRY(NAME##_ptsz)
static const struct hook copies[] = {
	// clang-format off
	TWICE(cuMemcpyHtoDAsync_v2) TWICE(cuMemcpyDtoHAsync_v2) TWICE(cuMemcpyDtoDAsync_v2)
	TWICE(cuMemcpyAsync) TWICE(cuMemcpyPeerAsync) TWICE(cuMemcpy2DAsync_v2)
	TWICE(cuMemsetD8Async) TWICE(cuMemsetD16Async) TWICE(cuMemsetD32Async)
	TWICE(cuStreamSynchronize) ENTRY(cuEventSynchronize) ENTRY(cuCtxSynchronize)
	ENTRY(cuMemcpyHtoD_v2) ENTRY(cuMemcpyHtoD_v2_ptds)
	ENTRY(cuMemcpyDtoH_v2) ENTRY(cuMemcpyDtoH_v2_ptds)
	// clang-format on
};

struct hook_list copy_hooks(void)
{
	return (struct hook_list){copies, sizeof copies / sizeof *copies};
}
