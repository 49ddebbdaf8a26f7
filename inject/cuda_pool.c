// SPDX-License-Identifier: Apache-2.0
// Pairs of events made beforehand, one pool a context; the gate; what became of them.
//
// An event pair around a launch on an idle device also times the host: the first event happens at once,
// the kernel arrives microseconds later. So a sampled launch is queued behind a kernel of ours that
// waits until the whole pair is in the stream, or GATE_NS are over: it ends by itself whatever
// becomes of the host's thread. A pair whose gate grew tired is not used. Where the program launches no
// kernel but only replays graphs, there is no gate.
#include "cuda.h"

#include <string.h>
#include <sys/mman.h>

#define MAX_POOLS 16
#define GATE_NS 40000
/* What CUPTI says that a kernel which does nothing takes, less what its pair lacks of the overhead of a
 * kernel with work to do: with this, the pairs of kernels of 0.9 to 160 us agreed with CUPTI to within
 * 0.5 us (short) and 0.9 us (long) on an H200. */
#define NULL_KERNEL_NS 400

static const char gate_code[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry sonde_gate(.param .u64 word, .param .u64 limit)\n"
	"{\n"
	".reg .b64 %a, %from, %now, %limit; .reg .b32 %open; .reg .pred %p;\n"
	"ld.param.u64 %a, [word];\n"
	"ld.param.u64 %limit, [limit];\n"
	"mov.u64 %from, %globaltimer;\n"
	"AGAIN:\n"
	"ld.volatile.global.u32 %open, [%a];\n"
	"setp.ne.u32 %p, %open, 0;\n"
	"@%p bra DONE;\n"
	"mov.u64 %now, %globaltimer;\n"
	"sub.u64 %now, %now, %from;\n"
	"setp.lt.u64 %p, %now, %limit;\n"
	"@%p bra AGAIN;\n"
	"mov.u32 %open, 1;\n"
	"st.volatile.global.u32 [%a+4], %open;\n"
	"DONE:\n"
	"ret;\n"
	"}\n"
	".visible .entry sonde_nothing()\n"
	"{\n"
	"ret;\n"
	"}\n";

static struct pool *_Atomic pools[MAX_POOLS];
static struct pool *spare; // of our thread, linked by nothing: one is enough
static _Atomic(cu_context) wanted;

static unsigned long long id_of(cu_context context)
{
	unsigned long long id = 0;
	return driver.cuCtxGetId && driver.cuCtxGetId(context, &id) == CU_OK ? id : 0;
}

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
			atomic_store(&p->gone, 1); // another one at the same place
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
	for (uint32_t k = 0; k < 8; k++) {
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
	uint32_t none = GATE_NONE;
	if (likely(atomic_load_explicit(&pool->gating, memory_order_acquire) == GATE_READY))
		return true;
	atomic_compare_exchange_strong(&pool->gating, &none, GATE_WANTED);
	return false;
}

static bool may_gate(struct pool *pool)
{
	return atomic_load_explicit(&pool->gating, memory_order_acquire) == GATE_READY &&
	       pool->gate;
}

#define MOST_REFUSED 100

static bool is_sticky(cu_result r)
{
	return r >= CU_STICKY_FROM && r < CU_STICKY_TO;
}

// `gated`: our thread measures with a gate before that is declared ready, and without.
static bool enqueue_begin(struct pool *pool, struct sample *s, cu_stream stream, bool gated)
{
	s->gated = false;
	if (gated) {
		uint64_t word = (uint64_t)(uintptr_t)s->gate, limit = GATE_NS;
		void *parameters[] = {&word, &limit};
		s->gate->open = 0;
		s->gate->tired = 0;
		s->gated = driver.cuLaunchKernel(pool->gate, 1, 1, 1, 1, 1, 1, 0, stream,
						 parameters, NULL) == CU_OK;
	}
	cu_result r = driver.cuEventRecord(s->begin, stream);
	if (likely(r == CU_OK)) {
		atomic_store_explicit(&pool->refused, 0, memory_order_relaxed);
		return true;
	}
	if (s->gated)
		s->gate->open = 1;
	// A stream of another context is nobody's fault; what goes on is.
	if (is_sticky(r) || atomic_fetch_add(&pool->refused, 1) >= MOST_REFUSED)
		atomic_store(&pool->failed, 1);
	return false;
}

bool pair_begin(struct pool *pool, struct sample *s, cu_stream stream, bool gated)
{
	return enqueue_begin(pool, s, stream, gated && may_gate(pool));
}

static bool end_pair(struct sample *s, cu_stream stream)
{
	bool whole = driver.cuEventRecord(s->end, stream) == CU_OK;
	if (s->gated) {
		atomic_thread_fence(memory_order_seq_cst);
		s->gate->open = 1;
	}
	return whole;
}

void pair_end(struct sample *s, cu_stream stream, bool launched)
{
	if (end_pair(s, stream) && launched)
		atomic_store(&s->state, SAMPLE_QUEUED);
	else
		pool_give_back(s);
}

// ---- our own thread ------------------------------------------------------------------------------

static uint32_t lower_quartile(uint32_t *of, unsigned n)
{
	for (unsigned i = 1; i < n; i++)
		for (unsigned k = i; k && of[k - 1] > of[k]; k--) {
			uint32_t swap = of[k];
			of[k] = of[k - 1], of[k - 1] = swap;
		}
	return n ? of[n / 4] : 0;
}

// What a pair says of a kernel that does nothing: not the kernel's, so not to be counted. What else
// the device does meanwhile only makes a pair longer, so not the median.
static uint32_t measure_bias(struct pool *p, bool gated)
{
	enum { ROUNDS = 21 };
	uint32_t found[ROUNDS];
	unsigned n = 0;
	cu_stream stream;
	struct sample *s = pool_take(p);
	if (!s)
		return 0;
	if (!p->nothing || (gated && !p->gate) ||
	    driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING_FLAG))
		goto out;
	for (int i = 0; i < ROUNDS && !step_is_unwanted(); i++) {
		float ms = 0;
		if (!enqueue_begin(p, s, stream, gated))
			break;
		bool ok = driver.cuLaunchKernel(p->nothing, 1, 1, 1, 1, 1, 1, 0, stream, NULL,
						NULL) == CU_OK;
		end_pair(s, stream);
		uint64_t until = now_ns() + 100000000u;
		while (!step_is_unwanted() && driver.cuEventQuery(s->end) == CU_NOT_READY &&
		       now_ns() < until) {
			struct timespec t = {0, 20000};
			clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
		}
		if (ok && !step_is_unwanted() &&
		    !driver.cuEventElapsedTime(&ms, s->begin, s->end) &&
		    !(s->gated && s->gate->tired))
			found[n++] = (uint32_t)(ms * 1e6f);
	}
	if (!step_is_unwanted()) // else it goes with its context
		driver.cuStreamDestroy_v2(stream);
out:
	pool_give_back(s);
	uint32_t pair_ns = lower_quartile(found, n);
	return pair_ns > NULL_KERNEL_NS ? pair_ns - NULL_KERNEL_NS : 0;
}

static bool make_events(struct pool *p)
{
	for (int k = 0; k < POOL_SAMPLES; k++)
		if (step_is_unwanted() || driver.cuEventCreate(&p->samples[k].begin, 0) ||
		    driver.cuEventCreate(&p->samples[k].end, 0))
			return false;
	return true;
}

static void make_gate(struct pool *p)
{
	cu_module module;
	struct gate_word *words;
	if (driver.cuModuleLoadData(&module, gate_code) ||
	    driver.cuModuleGetFunction(&p->nothing, module, "sonde_nothing") ||
	    driver.cuModuleGetFunction(&p->gate, module, "sonde_gate"))
		p->gate = NULL;
	else if (driver.cuMemHostAlloc((void **)&words, POOL_SAMPLES * 64, CU_HOST_PORTABLE))
		p->gate = NULL;
	for (int k = 0; p->gate && k < POOL_SAMPLES; k++)
		p->samples[k].gate = (void *)((char *)words + 64 * k);
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
			return; // failed: it stays so
	}
	struct pool *p = slot < 0 ? NULL : fresh_pool();
	if (!p)
		return;
	cu_context popped;
	p->context = context;
	p->failed = 1;
	if (driver.cuCtxPushCurrent_v2(context) == CU_OK) {
		p->id = id_of(context);
		driver.cuCtxGetDevice(&p->device);
		p->failed = !make_events(p);
		driver.cuCtxPopCurrent_v2(&popped);
	}
	if (step_is_unwanted())
		atomic_store(&p->gone, 1); // half made: begun again when the context is used again
	else if (p->failed)
		SET(reason, INJECT_NO_EVENTS);
	atomic_store_explicit(&pools[slot], p, memory_order_release);
}

static void make_gate_of(struct pool *p)
{
	cu_context popped;
	if (driver.cuCtxPushCurrent_v2(p->context) == CU_OK) {
		make_gate(p);
		p->bias_ns = measure_bias(p, true);
		p->bias_ungated_ns = measure_bias(p, false);
		SET(bias_ns, p->bias_ns);
		driver.cuCtxPopCurrent_v2(&popped);
	}
	if (step_is_unwanted()) // measured in part
		atomic_store(&p->gone, 1);
	atomic_store_explicit(&p->gating, GATE_READY, memory_order_release);
}

static void read_sample(struct pool *p, struct sample *s)
{
	float ms = 0;
	cu_result r = driver.cuEventQuery(s->end);
	if (r == CU_NOT_READY)
		return;
	struct inject_record *record = &s->record;
	if (r == CU_OK)
		r = driver.cuEventElapsedTime(&ms, s->begin, s->end);
	bool tired = s->gated && s->gate->tired;
	if (r != CU_OK || ms < 0 || tired) {
		COUNT(lost_order, 1);
		if (r == CU_OK)
			sampling_carry(record->type, record->weight);
		else if (is_sticky(r) || atomic_fetch_add(&p->refused, 1) >= MOST_REFUSED)
			atomic_store(&p->failed, 1);
		pool_give_back(s);
		return;
	}
	double ns = (double)ms * 1e6;
	// A copy is often queued behind other work, where its pair holds no time of the host.
	bool without_host = s->gated || record->type == INJECT_COPY || record->type == INJECT_SET;
	ns -= without_host ? p->bias_ns : p->bias_ungated_ns;
	record->flags = s->gated ? INJECT_GATED : 0;
	record->end_ns = record->start_ns + (uint64_t)(ns > 0 ? ns : 0);
	if (s->frames.count)
		frames_put(&s->frames, record->correlation, record->tid);
	else
		record->flags |= INJECT_NO_STACK;
	sampling_put(record);
	pool_give_back(s);
}

static void turn_of_pool(struct pool *p)
{
	if (!atomic_load(&p->failed) && atomic_load(&p->gating) == GATE_WANTED)
		make_gate_of(p);
	for (int n = 0; n < POOL_SAMPLES; n++) {
		if (atomic_load(&p->gone) || step_is_unwanted())
			return;
		if (atomic_load(&p->samples[n].state) == SAMPLE_QUEUED)
			read_sample(p, &p->samples[n]);
	}
}

void pools_turn(void)
{
	cu_context context = atomic_exchange(&wanted, NULL);
	if (context)
		make_pool(context);
	for (int k = 0; k < MAX_POOLS && !step_is_unwanted(); k++) {
		struct pool *p = atomic_load_explicit(&pools[k], memory_order_acquire);
		if (!p)
			continue;
		if (!atomic_load(&p->gone)) {
			turn_of_pool(p);
		} else if (!spare && !launches_under_way()) {
			// Asked after it was gone: who comes now passes it by, and nobody has it still.
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
