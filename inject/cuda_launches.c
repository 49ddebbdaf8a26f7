// SPDX-License-Identifier: Apache-2.0
// Launches and graph replays of the CUDA driver, some of them timed between a pair of our events.
//
// The hooks sit in the pointer slots through which runtimes call the driver (pointer_scan.c). Most launches pass
// through with a test and a count. A sampled one goes into its stream between two events, behind a
// gate (cuda_gate.c), unless its stream, or any, is being captured.
#include "cuda.h"

#include <string.h>

static _Atomic int capturing; // stream captures that began and did not end, as far as was seen
static _Atomic uint64_t capture_ns; // when the last one began

#define CAPTURE_FORGOTTEN_NS 30000000000ull /* after this its end is taken for missed */

static bool any_capture(void)
{
	if (likely(atomic_load(&capturing) <= 0))
		return false;
	if (now_ns() - atomic_load(&capture_ns) < CAPTURE_FORGOTTEN_NS)
		return true;
	atomic_store(&capturing, 0); // its end was not seen, or never happens
	return false;
}

static uint32_t name_of(cu_function f)
{
	const char *name = NULL;
	// Runtimes since CUDA 12 launch library kernels as functions.
	if (driver.cuFuncGetName && driver.cuFuncGetName(&name, f) == CU_OK && name)
		return shared_name(name);
	if (driver.cuKernelGetName && driver.cuKernelGetName(&name, f) == CU_OK && name)
		return shared_name(name);
	return 0;
}

static void leave(struct launch *l)
{
	self_sampling.busy = 0;
	if (l->sample)
		pool_give_back(l->sample);
	l->sample = NULL;
	section_leave(l->section);
}

static bool leave_untimed(struct launch *l, double weight)
{
	unsigned type = l->sample->record.type;
	leave(l);
	sampling_carry(type, weight);
	return false;
}

static bool is_captured(cu_stream stream)
{
	int capture = CU_STREAM_CAPTURE_NONE;
	return any_capture() || driver.cuStreamIsCapturing(stream, &capture) ||
	       capture != CU_STREAM_CAPTURE_NONE;
}

bool launch_begin(struct launch *l, enum inject_type type, cu_stream stream, bool per_thread,
		  void *frame, void *caller)
{
	uint32_t weight;
	bool for_good = false;
	// A handler of a signal that came between the events of a pair passes through.
	if (self_sampling.busy || !sampling_due(type, &weight))
		return false;
	*l = (struct launch){.begun_ns = now_ns(), .gated = true};
	l->stream = stream ? stream : per_thread ? CU_PER_THREAD : CU_LEGACY;
	if (!(l->section = section_enter())) {
		COUNT(lost_pool, 1);
		sampling_carry(type, weight);
		return false;
	}
	self_sampling.busy = 1;
	if (!(l->pool = pool_here(&for_good)) || !(l->sample = pool_take(l->pool))) {
		leave(l);
		COUNT(lost_pool, 1);
		if (!for_good)
			sampling_carry(type, weight);
		return false;
	}
	l->sample->record.type = type;
	l->sample->record.weight = weight;
	atomic_store(&l->section->sample, l->sample);
	if (cuda_yields()) { // another tool began to trace since the hook was armed
		leave(l);
		sampling_carry(type, weight);
		return false;
	}
	if (is_captured(l->stream)) {
		COUNT(left_capturing, 1);
		leave(l);
		return false;
	}
	uint32_t request = shared.control->request;
	struct inject_record *r = &l->sample->record;
	*r = (struct inject_record){
		.type = type,
		.source = INJECT_BY_EVENT,
		.correlation = next_correlation(),
		.weight = weight,
		.stream = (uint64_t)(uintptr_t)stream,
		.tid = self_sampling.tid,
		.device = (uint32_t)l->pool->device,
	};
	l->sample->frames.count = 0;
	if (request & INJECT_STACKS)
		frames_walk(&l->sample->frames, frame, (uintptr_t)caller);
	if (request & INJECT_SITE)
		sonde_inject_site(r->correlation);
	return true;
}

bool launch_begin_pair(struct launch *l)
{
	struct inject_record *r = &l->sample->record;
	l->sample->unproved = r->type == INJECT_KERNEL && !pool_gated(l->pool);
	l->sample->behind = false;
	if (pair_begin(l->pool, l->sample, l->stream, l->gated)) {
		l->own_ns = now_ns() - l->begun_ns;
		return true;
	}
	COUNT(lost_order, 1);
	return leave_untimed(l, r->weight);
}

void launch_end(struct launch *l, cu_result launched)
{
	uint64_t returned_ns = now_ns();
	l->sample->record.start_ns = returned_ns;
	atomic_store(&l->section->sample, NULL); // from here on it is our thread's
	pair_end(l->pool, l->sample, l->stream, launched == CU_OK);
	l->sample = NULL;
	leave(l);
	sampling_cost(l->own_ns + now_ns() - returned_ns);
}

static void describe(struct launch *l, cu_function f, const unsigned *grid, const unsigned *block,
		     unsigned shared_bytes)
{
	struct inject_record *r = &l->sample->record;
	r->name = name_of(f);
	memcpy(r->grid, grid, sizeof r->grid);
	memcpy(r->block, block, sizeof r->block);
	r->shared_bytes = shared_bytes;
}

static void describe_replay(struct launch *l, cu_graph_exec graph)
{
	struct inject_record *r = &l->sample->record;
	r->graph = (uint64_t)(uintptr_t)graph;
}

#define GRID ((unsigned[3]){gx, gy, gz})
#define BLOCK ((unsigned[3]){bx, by, bz})
#define OF_LAUNCH describe(&l, f, GRID, BLOCK, shared_bytes)
#define OF_CONFIG describe(&l, f, config->grid, config->block, config->shared_bytes)
#define OF_REPLAY describe_replay(&l, graph)

// clang-format off
HOOK(cuLaunchKernel, INJECT_KERNEL, false, LAUNCH_PARAMETERS, LAUNCH_VALUES, stream, OF_LAUNCH)
HOOK(cuLaunchKernel_ptsz, INJECT_KERNEL, true, LAUNCH_PARAMETERS, LAUNCH_VALUES, stream, OF_LAUNCH)
HOOK(cuLaunchCooperativeKernel, INJECT_KERNEL, false, COOPERATIVE_PARAMETERS, COOPERATIVE_VALUES, stream, OF_LAUNCH)
HOOK(cuLaunchCooperativeKernel_ptsz, INJECT_KERNEL, true, COOPERATIVE_PARAMETERS, COOPERATIVE_VALUES, stream, OF_LAUNCH)
HOOK(cuLaunchKernelEx, INJECT_KERNEL, false, EXTENSIBLE_PARAMETERS, EXTENSIBLE_VALUES, config->stream, OF_CONFIG)
HOOK(cuLaunchKernelEx_ptsz, INJECT_KERNEL, true, EXTENSIBLE_PARAMETERS, EXTENSIBLE_VALUES, config->stream, OF_CONFIG)
HOOK(cuGraphLaunch, INJECT_REPLAY, false, REPLAY_PARAMETERS, REPLAY_VALUES, stream, OF_REPLAY)
HOOK(cuGraphLaunch_ptsz, INJECT_REPLAY, true, REPLAY_PARAMETERS, REPLAY_VALUES, stream, OF_REPLAY)
// clang-format on

// ---- stream captures: no pair may be half in a stream when one begins -----------------------------

static void capture_begins(void)
{
	atomic_store(&capture_ns, now_ns());
	atomic_fetch_add(&capturing, 1);
	launches_wait_out();
}

static cu_result capture_began(cu_result result)
{
	if (result != CU_OK)
		atomic_fetch_sub(&capturing, 1);
	return result;
}

static cu_result capture_ended(cu_result result)
{
	if (atomic_fetch_sub(&capturing, 1) <= 0)
		atomic_store(&capturing, 0); // it had begun before our hooks were in
	return result;
}

#define BEGINS(NAME, PARAMETERS, VALUES)                                                           \
	static cu_result(*real_##NAME) PARAMETERS;                                                 \
	static cu_result hook_##NAME PARAMETERS                                                    \
	{                                                                                          \
		capture_begins();                                                                  \
		return capture_began(REAL(NAME) VALUES);                                           \
	}
#define ENDS(NAME)                                                                                 \
	static cu_result (*real_##NAME)(cu_stream stream, void **graph);                           \
	static cu_result hook_##NAME(cu_stream stream, void **graph)                               \
	{                                                                                          \
		return capture_ended(REAL(NAME)(stream, graph));                                   \
	}
#define MODE_PARAMETERS (cu_stream stream, int mode)
#define TO_GRAPH_PARAMETERS                                                                        \
	(cu_stream stream, void *graph, const void *nodes, const void *edges, size_t count,        \
	 int mode)
#define TO_GRAPH_VALUES (stream, graph, nodes, edges, count, mode)
BEGINS(cuStreamBeginCapture_v2, MODE_PARAMETERS, (stream, mode))
BEGINS(cuStreamBeginCapture_v2_ptsz, MODE_PARAMETERS, (stream, mode))
BEGINS(cuStreamBeginCaptureToGraph, TO_GRAPH_PARAMETERS, TO_GRAPH_VALUES)
BEGINS(cuStreamBeginCaptureToGraph_ptsz, TO_GRAPH_PARAMETERS, TO_GRAPH_VALUES)
ENDS(cuStreamEndCapture)
ENDS(cuStreamEndCapture_ptsz)

// ---- for cuda.c ---------------------------------------------------------------------------

static const struct hook launches[] = {
	// clang-format off
	ENTRY(cuLaunchKernel) ENTRY(cuLaunchKernel_ptsz)
	ENTRY(cuLaunchCooperativeKernel) ENTRY(cuLaunchCooperativeKernel_ptsz)
	ENTRY(cuLaunchKernelEx) ENTRY(cuLaunchKernelEx_ptsz)
	ENTRY(cuGraphLaunch) ENTRY(cuGraphLaunch_ptsz)
	ENTRY(cuStreamBeginCapture_v2) ENTRY(cuStreamBeginCapture_v2_ptsz)
	ENTRY(cuStreamBeginCaptureToGraph) ENTRY(cuStreamBeginCaptureToGraph_ptsz)
	ENTRY(cuStreamEndCapture) ENTRY(cuStreamEndCapture_ptsz)
	// clang-format on
};

struct hook_list launch_hooks(void)
{
	return (struct hook_list){launches, sizeof launches / sizeof *launches};
}

launch_kernel_fn real_launch_kernel(void)
{
	return real_cuLaunchKernel;
}

void captures_forget(void)
{
	atomic_store(&capturing, 0);
}
