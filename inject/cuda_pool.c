// SPDX-License-Identifier: Apache-2.0
// Pools of pairs of events, one for each context: made by our thread, found by threads that launch, polled for pairs
// that the device has passed, and left alone once they are gone: their context is, or they could not be made whole
// (then their events stay until the context ends).
#include "cuda.h"

#include <string.h>
#include <sys/mman.h>

#define MAX_POOLS 16 /* launches in further contexts are not timed, and counted (lost_pool) */
#define TRIES 8	     /* samples that a thread of the program looks at for a free one */

static struct pool *_Atomic pools[MAX_POOLS];
static struct pool *spare;	   // our thread's: memory of a pool that is gone, for the next one
static _Atomic(cu_context) wanted; // by a thread that launched in it and found no pool

static unsigned long long id_of(cu_context context)
{
	unsigned long long id = 0;
	return driver.cuCtxGetId && driver.cuCtxGetId(context, &id) == CU_OK ? id : 0;
}

// `for_good` is set where the context has a pool: whether that failed.
struct pool *pool_here(bool *for_good)
{
	cu_context context = NULL;
	if (driver.cuCtxGetCurrent(&context) || !context)
		return NULL;
	for (int k = 0; k < MAX_POOLS; k++) {
		struct pool *p = atomic_load_explicit(&pools[k], memory_order_acquire);
		if (!p || p->context != context || atomic_load(&p->gone))
			continue;
		if (p->id && p->id != id_of(context)) {
			atomic_store(&p->gone, 1); // another context at the same address
			continue;
		}
		*for_good = atomic_load_explicit(&p->failed, memory_order_relaxed);
		return *for_good ? NULL : p;
	}
	cu_context none = NULL;
	watch_exit();
	atomic_compare_exchange_strong(&wanted, &none, context);
	return NULL;
}

struct sample *pool_take(struct pool *pool)
{
	uint32_t from = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
	for (uint32_t k = 0; k < TRIES; k++) {
		struct sample *s = &pool->samples[(from + k) % POOL_SAMPLES];
		uint32_t is_free = SAMPLE_FREE;
		if (atomic_compare_exchange_strong(&s->state, &is_free, SAMPLE_TAKEN))
			return s;
	}
	return NULL;
}

void pool_give_back(struct sample *s)
{
	atomic_store(&s->state, SAMPLE_FREE);
}

bool pool_gated(struct pool *pool)
{
	return atomic_load_explicit(&pool->gating, memory_order_acquire) == GATE_READY;
}

// ---- our own thread ------------------------------------------------------------------------------

static bool make_events(struct pool *p)
{
	for (int k = 0; k < POOL_SAMPLES; k++)
		if (step_is_unwanted() || driver.cuEventCreate(&p->samples[k].begin, 0) ||
		    driver.cuEventCreate(&p->samples[k].end, 0))
			return false;
	return !step_is_unwanted() && !driver.cuEventCreate(&p->calibration.begin, 0) &&
	       !driver.cuEventCreate(&p->calibration.end, 0);
}

static struct pool *fresh_pool(void)
{
	struct pool *p = spare;
	spare = NULL;
	if (p) {
		memset(p, 0, sizeof *p);
		return p;
	}
	p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return p == MAP_FAILED ? NULL : p;
}

static void make_pool(cu_context context)
{
	int slot = -1;
	for (int k = 0; k < MAX_POOLS; k++) {
		struct pool *p = atomic_load(&pools[k]);
		if (!p && slot < 0)
			slot = k;
		if (p && p->context == context && !atomic_load(&p->gone))
			return; // it failed, or another thread asked for it too
	}
	struct pool *p = slot < 0 ? NULL : fresh_pool();
	if (!p)
		return;
	cu_context popped;
	p->context = context;
	p->bias_ns = PAIR_NS;
	atomic_store(&p->calibration.state, SAMPLE_TAKEN);
	p->failed = 1;
	if (driver.cuCtxPushCurrent_v2(context) == CU_OK) {
		p->id = id_of(context);
		driver.cuCtxGetDevice(&p->device);
		p->failed = !make_events(p);
		driver.cuCtxPopCurrent_v2(&popped);
	}
	if (step_is_unwanted())
		atomic_store(&p->gone, 1); // incomplete: the next use of the context makes another
	else if (p->failed)
		SET(reason, INJECT_NO_EVENTS);
	atomic_store_explicit(&pools[slot], p, memory_order_release);
}

static void poll_pool(struct pool *p)
{
	if (!atomic_load(&p->failed) && atomic_load(&p->gating) == GATE_WANTED)
		gate_make(p);
	if (!atomic_load(&p->gone) && !step_is_unwanted())
		bias_read(p);
	for (int n = 0; n < POOL_SAMPLES; n++) {
		if (atomic_load(&p->gone) || step_is_unwanted())
			return;
		if (atomic_load(&p->samples[n].state) == SAMPLE_QUEUED)
			pair_read(p, &p->samples[n]);
	}
}

void pools_poll(void)
{
	cu_context context = atomic_exchange(&wanted, NULL);
	if (context)
		make_pool(context);
	for (int k = 0; k < MAX_POOLS && !step_is_unwanted(); k++) {
		struct pool *p = atomic_load_explicit(&pools[k], memory_order_acquire);
		if (!p)
			continue;
		if (!atomic_load(&p->gone)) {
			poll_pool(p);
		} else if (!spare && !launches_under_way()) {
			// Checked after it was marked as gone: no thread can still use it, and no other takes it.
			atomic_store(&pools[k], NULL);
			spare = p;
		}
	}
}

bool pools_pending(void)
{
	for (int k = 0; k < MAX_POOLS; k++) {
		struct pool *p = atomic_load_explicit(&pools[k], memory_order_acquire);
		for (int n = 0; p && !atomic_load(&p->gone) && n < POOL_SAMPLES; n++)
			if (atomic_load(&p->samples[n].state) == SAMPLE_QUEUED)
				return true;
	}
	return false;
}

void pools_forget(void)
{
	for (int k = 0; k < MAX_POOLS; k++)
		atomic_store(&pools[k], NULL);
	atomic_store(&wanted, NULL);
}

void pools_nothing_wanted(void)
{
	atomic_store(&wanted, NULL);
}

static bool is_any(const struct pool *p, cu_context context, int device)
{
	(void)p, (void)context, (void)device;
	return true;
}

static bool is_of_context(const struct pool *p, cu_context context, int device)
{
	(void)device;
	return p->context == context;
}

static bool is_of_device(const struct pool *p, cu_context context, int device)
{
	(void)context;
	return p->device == device;
}

static void take_away(bool (*is)(const struct pool *, cu_context, int), cu_context context,
		      int device)
{
	for (int k = 0; k < MAX_POOLS; k++) {
		struct pool *p = atomic_load(&pools[k]);
		if (p && is(p, context, device))
			atomic_store(&p->gone, 1);
	}
}

void pools_of_context_gone(cu_context context)
{
	take_away(is_of_context, context, 0);
}

void pools_of_device_gone(int device)
{
	take_away(is_of_device, NULL, device);
}

void pools_gone(void)
{
	take_away(is_any, NULL, 0);
	pools_nothing_wanted();
}
