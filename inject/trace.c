// SPDX-License-Identifier: Apache-2.0
// A trace: for a while, CUPTI records every kernel, copy, set and call. It has a thread for as long as it takes, with
// a stack that is large enough for CUPTI's calls; the library's one thread goes on meanwhile.
#include "cupti.h"

#include <string.h>
#include <sys/prctl.h>

#define STACK_BYTES (1u << 20)
#define NAP_NS 2000000u		    /* between two checks of whether the trace is over */
#define DRAIN_NS 10000000u	    /* between two flushes of what has not ended yet */
#define DRAINS 30		    /* flushes at most */
#define AFTER_CALLS_NS 30000000u    /* between switching off calls and switching off kernels */
#define STEP_ASIDE_NS 2000000000ull /* longest wait of another user of CUPTI for our end */

static struct cupti cupti;
static uint32_t window_us; // of the one under way
static bool window_taken;
static _Atomic uint32_t running, unwanted; // number of the window that runs, that is to end
// Kernels are switched on last: where they were on before the calls, a process once got no records of kernels any
// more, for torch.profiler either.
static const int kinds[] = {CUPTI_MEMCPY_PEER, CUPTI_MEMCPY, CUPTI_MEMSET, CUPTI_CONCURRENT_KERNEL};
#define KINDS (sizeof kinds / sizeof *kinds)
static bool all_calls; // record all calls of the driver: costs the program much, also afterwards

bool trace_is_running(void)
{
	return atomic_load(&running) != 0;
}

void trace_end(void)
{
	atomic_store(&unwanted, atomic_load(&running));
}

void trace_step_aside(void)
{ // bounded: the host must not hang with CUPTI
	if (likely(!trace_is_running()))
		return;
	trace_end();
	uint64_t until = now_ns() + STEP_ASIDE_NS;
	for (int i = 0; trace_is_running() && now_ns() < until; i++)
		short_nap(i);
}

static bool functions_found(void)
{
#define FIND(name, arguments)                                                                      \
	if (!(cupti.name = (cupti_result(*) arguments)module_symbol(CUPTI, #name)))                \
		return false;
	CUPTI_FUNCTIONS(FIND)
	return true;
}

// Whether another tool traces, as far as is known. Kineto (torch.profiler) keeps its CUPTI subscription after its first
// session, nsys has it from the program's start. So without a subscriber nobody traces; with one it is only known
// where our hooks have seen it switch. Whether there is one, the agent reads in the process's memory. To subscribe, if
// only to see whether that is refused, ends programs: CUPTI marks its tables as made before it has made them, and a
// thread of the program that makes or destroys a graph, a stream or a module meanwhile reads them.
static bool is_taken(void)
{
	return profilers_trace() || (window_taken && !profilers_are_known());
}

static void read_clocks(uint64_t *ours, uint64_t *theirs)
{
	uint64_t before = now_ns();
	cupti.cuptiGetTimestamp(theirs);
	*ours = before + (now_ns() - before) / 2;
}

// Another profiler waits for the end of our trace for STEP_ASIDE_NS only: what it has switched on by then stays on.
static void disable(int kind)
{
	if (!profilers_have_on(kind))
		cupti.cuptiActivityDisable(kind);
}

static void switch_off(unsigned count)
{
	while (count--)
		disable(kinds[count]);
}

static void give_callbacks_back(void)
{
	cupti_buffer_requested requested;
	cupti_buffer_completed completed;
	if (profilers_callbacks(&requested, &completed))
		cupti.cuptiActivityRegisterCallbacks(requested, completed);
}

// Who asked for a kernel or copy is known only where its call was recorded. CUPTI may record none of these where
// libraries call the driver by themselves (cuBLAS): the agent takes such runs by their number in the order of calls.
static bool asks_for_runs(const char *name)
{
	return !strncmp(name, "cuLaunch", 8) || !strncmp(name, "cuGraphLaunch", 13) ||
	       !strncmp(name, "cuMemcpy", 8) || !strncmp(name, "cuMemset", 8);
}

static cupti_result switch_driver_calls(bool on)
{
	if (all_calls) {
		if (on)
			return cupti.cuptiActivityEnable(CUPTI_DRIVER);
		disable(CUPTI_DRIVER);
		return 0;
	}
	unsigned switched = 0;
	const char *name;
	for (uint32_t id = 1; id < CUPTI_DRIVER_CALLS; id++)
		if (!cupti.cuptiGetCallbackName(CUPTI_DOMAIN_DRIVER, id, &name) && name &&
		    asks_for_runs(name))
			switched += !cupti.cuptiActivityEnableDriverApi(id, on);
	return switched ? 0 : CUPTI_NOT_SWITCHED;
}

static cupti_result switch_calls(bool on)
{
	cupti_result result = 0;
	if (on)
		result = cupti.cuptiActivityEnable(CUPTI_RUNTIME);
	else
		disable(CUPTI_RUNTIME);
	return result ? result : switch_driver_calls(on);
}

static enum inject_reason failed(cupti_result result)
{
	SET(cupti_error, (uint32_t)result);
	return result == CUPTI_NO_PRIVILEGES	     ? INJECT_CUPTI_DENIED :
	       result == CUPTI_SUBSCRIBED_BY_ANOTHER ? INJECT_CUPTI_TAKEN :
						       INJECT_CUPTI_FAILED;
}

static enum inject_reason switch_on(struct inject_trace *head, int *thread_ids)
{
	uint64_t began = now_ns();
	if (is_taken())
		return INJECT_CUPTI_TAKEN;
	cupti_result result =
		cupti.cuptiActivityRegisterCallbacks(cupti_wants_buffer, cupti_gives_buffer);
	if (result) {
		give_callbacks_back();
		return failed(result);
	}
	*thread_ids = -1;
	cupti.cuptiGetThreadIdType(thread_ids);
	cupti.cuptiSetThreadIdType(CUPTI_THREAD_ID_SYSTEM);
	records_keep(true);
	read_clocks(&head->opened_ns, &head->opened_cupti_ns);
	result = switch_calls(true);
	for (unsigned k = 0; k < KINDS && !result; k++)
		if ((result = cupti.cuptiActivityEnable(kinds[k])))
			switch_off(k);
	if (result) {
		switch_calls(false);
		if (*thread_ids >= 0)
			cupti.cuptiSetThreadIdType(*thread_ids);
		give_callbacks_back();
		return failed(result);
	}
	head->switch_ns = now_ns() - began;
	return INJECT_OK;
}

// What was launched may still run, or wait in a queue: CUPTI hands over what is complete.
static void drain(struct inject_trace *head)
{
	uint64_t before = UINT64_MAX;
	for (int i = 0; i < DRAINS; i++) {
		uint64_t records = __atomic_load_n(&head->records, __ATOMIC_RELAXED);
		if (records == before && !records_held())
			break;
		before = records;
		nap(DRAIN_NS);
		cupti.cuptiActivityFlushAll(0);
	}
}

static void close_window(struct inject_trace *head, int thread_ids)
{
	read_clocks(&head->closed_ns, &head->closed_cupti_ns);
	switch_calls(false);
	// A replay that runs while kernels are switched off gets a wrong end (10 ms too late, on an H100). After this
	// pause such a replay is mostly one whose call is not recorded any more, so that it is not used.
	nap(AFTER_CALLS_NS);
	cupti.cuptiActivityFlushAll(0);
	cupti.cuptiGetTimestamp(&head->off_cupti_ns);
	switch_off(KINDS);
	drain(head);
	if (thread_ids >= 0)
		cupti.cuptiSetThreadIdType(thread_ids);
	give_callbacks_back();
	head->drained_ns = now_ns() - head->closed_ns;
}

// Begin a step, after a wait while a context is being destroyed. False: the process exits, or `window`, which is 0
// once something is switched on, is not wanted any more.
static bool step_begun(uint32_t window)
{
	while (!step_begin()) {
		if (steps_are_closed() || (window && atomic_load(&unwanted) == window))
			return false;
		nap(NAP_NS);
	}
	return true;
}

static enum inject_reason trace(uint32_t window)
{
	int thread_ids = -1;
	if (!functions_found())
		return INJECT_CUPTI_MISSING;
	uint32_t version = 0;
	cupti.cuptiGetVersion(&version);
	SET(cupti_version, version);
	if (!records_begin(&cupti, window))
		return INJECT_NO_MEMORY;
	struct inject_trace *head = records_head();
	if (!step_begun(window))
		return INJECT_CUPTI_FAILED;
	cuda_relax_thread();
	enum inject_reason reason = switch_on(head, &thread_ids);
	step_end();
	if (reason != INJECT_OK) {
		records_keep(false);
		return reason;
	}
	uint64_t until = head->opened_ns + window_us * 1000ull;
	while (now_ns() < until && atomic_load(&unwanted) != window)
		nap(NAP_NS);
	head->cut = now_ns() < until;
	if (!step_begun(0))
		return INJECT_CUPTI_FAILED; // the process exits: CUPTI is left as it is
	close_window(head, thread_ids);
	step_end();
	records_keep(false);
	head->held = records_held();
	records_publish();
	COUNT(windows, 1);
	COUNT(window_records, head->records);
	COUNT(window_dropped, head->dropped + head->left_out);
	COUNT(window_cut, head->cut);
	return INJECT_OK;
}

static void *run(void *unused)
{
	(void)unused;
	prctl(PR_SET_NAME, "sonde-trace");
	uint32_t window = atomic_load(&running);
	enum inject_reason reason = trace(window);
	SET(window_reason, reason);
	__atomic_store_n(&shared.state->window_done, window, __ATOMIC_RELEASE);
	atomic_store(&running, 0); // last: from here on trace_poll may write both
	return NULL;
}

void trace_poll(uint32_t window, uint32_t us)
{
	if (trace_is_running())
		return;
	if (!window) {
		records_forget();
		SET(window_done, 0);
	}
	if (window == shared.state->window_done)
		return;
	pthread_attr_t attributes;
	pthread_t thread;
	all_calls = shared.control->window_calls == 1;
	window_taken = shared.control->window_taken == 1;
	window_us = us < INJECT_TRACE_MOST_US ? us : INJECT_TRACE_MOST_US;
	atomic_store(&running, window);
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	if (pthread_create(&thread, &attributes, run, NULL)) { // with our signal mask: all blocked
		atomic_store(&running, 0);
		SET(window_reason, INJECT_NO_MEMORY);
		SET(window_done, window);
	}
	pthread_attr_destroy(&attributes);
}

void trace_forget(void)
{
	atomic_store(&running, 0);
	atomic_store(&unwanted, 0);
	records_forget_in_child();
}
