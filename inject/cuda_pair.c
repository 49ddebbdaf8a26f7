// SPDX-License-Identifier: Apache-2.0
// A pair of events around a launch: begun, whole, and read once the device has passed it.
//
// On an idle device a pair also times the host: the first event happens at once, the kernel arrives
// microseconds later. So a kernel is queued behind the gate (cuda_gate.c), or is not used unless the device
// was behind with its stream when the pair was whole.
#include "cuda.h"

#define GATE_NS 40000	 /* longest delay of the program's kernel by a gate */
#define MOST_REFUSED 100 /* events in a row that were not recorded: then the pool is given up */

static bool is_sticky(cu_result r)
{
	return r >= CU_STICKY_FROM && r < CU_STICKY_TO;
}

static bool enqueue_begin(struct pool *pool, struct sample *s, cu_stream stream, bool gated)
{
	s->gated = false;
	if (gated) {
		uint64_t state = (uint64_t)(uintptr_t)s->gate, limit = GATE_NS;
		void *parameters[] = {&state, &limit};
		s->gate->open = 0;
		s->gate->timed_out = 0;
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
	// A launch into a stream of another context is refused, too; many in a row are an error of the context.
	if (is_sticky(r) || atomic_fetch_add(&pool->refused, 1) >= MOST_REFUSED)
		atomic_store(&pool->failed, 1);
	return false;
}

static bool enqueue_end(struct pool *pool, struct sample *s, cu_stream stream)
{
	bool whole = driver.cuEventRecord(s->end, stream) == CU_OK;
	if (s->gated) {
		if (whole)
			bias_enqueue(pool, s, stream);
		atomic_thread_fence(memory_order_seq_cst);
		s->gate->open = 1;
	}
	return whole;
}

// A pair that may hold time of the host is not used. Such pairs are no random choice: they are those of the first
// launches after a pause, and others would carry their weight. So a gate is requested where they come again and again:
// each adds 256 to the score `without`, each other one takes 1 off, and the gate comes with the ninth. The first pair
// in each of STREAMS_BEFORE streams is such a one, too.
#define FAILED_WEIGHS 256u
#define MOST_WITHOUT (FAILED_WEIGHS * STREAMS_BEFORE + 1)

// One key for each stream. The default stream of every thread has the same handle, so its key is made from the tid. It
// ends in 2, which no address of a stream does.
static cu_stream key_of(cu_stream stream)
{
	if (stream != CU_PER_THREAD)
		return stream;
	return (cu_stream)(uintptr_t)((uint64_t)self_sampling.tid << 32 | 2);
}

// The place in pool->before of the last pair of a stream. If it has none: a free place, or, by turns, one that another
// stream has.
static struct sample *_Atomic *last_in(struct pool *pool, cu_stream key)
{
	for (int k = 0; k < STREAMS_BEFORE; k++) {
		struct sample *last = atomic_load(&pool->before[k]);
		if (!last || atomic_load(&last->key) == key)
			return &pool->before[k];
	}
	uint32_t turn = atomic_load_explicit(&pool->next, memory_order_relaxed);
	return &pool->before[turn % STREAMS_BEFORE];
}

// Note the pair before this one in its stream, and which use of it.
static void look_before(struct pool *pool, struct sample *s, cu_stream stream)
{
	cu_stream key = key_of(stream);
	s->before = atomic_load(last_in(pool, key));
	if (!s->before)
		return;
	s->before_use = atomic_load(&s->before->use);
	if (atomic_load(&s->before->key) != key)
		s->before = NULL;
}

bool pair_begin(struct pool *pool, struct sample *s, cu_stream stream, bool gated)
{
	s->before = NULL;
	if (s->unproved)
		look_before(pool, s, stream);
	atomic_store(&s->use, s->record.correlation);
	atomic_store(&s->key, key_of(stream));
	return enqueue_begin(pool, s, stream, gated && pool_gated(pool) && pool->gate);
}

// In a thread of the program. Relaxed, because another thread's stream capture in global mode forbids queries.
static bool has_not_happened(cu_event event)
{
	int mode = CU_CAPTURE_MODE_RELAXED;
	if (driver.cuThreadExchangeStreamCaptureMode(&mode) != CU_OK)
		return false;
	bool is_so = driver.cuEventQuery(event) == CU_NOT_READY;
	driver.cuThreadExchangeStreamCaptureMode(&mode);
	return is_so;
}

// Whether the pair before this one is still that of the launch that was noted.
static bool is_before_queued(const struct sample *s)
{
	return atomic_load(&s->before->state) == SAMPLE_QUEUED &&
	       atomic_load(&s->before->use) == s->before_use;
}

// Was the device behind with this stream when the pair was whole? Then there is no time of the host in it,
// though it had no gate. It was, if the device had not passed the end of the pair before.
static bool was_behind(struct pool *pool, const struct sample *s)
{
	uint32_t none = GATE_NONE, without = atomic_load(&pool->without);
	if (s->before && is_before_queued(s) && has_not_happened(s->before->end) &&
	    is_before_queued(s)) {
		if (without)
			atomic_compare_exchange_strong(&pool->without, &without, without - 1);
		return true;
	}
	if (atomic_fetch_add(&pool->without, FAILED_WEIGHS) + FAILED_WEIGHS >= MOST_WITHOUT)
		atomic_compare_exchange_strong(&pool->gating, &none, GATE_WANTED);
	return false;
}

void pair_end(struct pool *pool, struct sample *s, cu_stream stream, bool launched)
{
	if (!enqueue_end(pool, s, stream) || !launched) {
		pool_give_back(s);
		return;
	}
	if (s->unproved) {
		s->behind = was_behind(pool, s);
		s->unproved = !s->behind;
		COUNT(lost_pool, s->unproved);
	}
	atomic_store(last_in(pool, key_of(stream)), s);
	atomic_store(&s->state, SAMPLE_QUEUED);
}

// ---- our own thread ------------------------------------------------------------------------------

void pair_read(struct pool *p, struct sample *s)
{
	float ms = 0;
	cu_result r = driver.cuEventQuery(s->end);
	if (r == CU_NOT_READY)
		return;
	struct inject_record *record = &s->record;
	if (r == CU_OK)
		r = driver.cuEventElapsedTime(&ms, s->begin, s->end);
	bool timed_out = s->gated && s->gate->timed_out;
	if (r != CU_OK || ms < 0 || timed_out || s->unproved) {
		COUNT(lost_order, !s->unproved);
		if (r == CU_OK)
			sampling_carry(record->type, record->weight);
		else if (is_sticky(r) || atomic_fetch_add(&p->refused, 1) >= MOST_REFUSED)
			atomic_store(&p->failed, 1);
		pool_give_back(s);
		return;
	}
	double ns = (double)ms * 1e6;
	// A copy is often queued behind other work, where its pair holds no time of the host. What it is of the
	// host's in others is not known.
	bool proved = s->gated || s->behind;
	if (proved || record->type == INJECT_COPY || record->type == INJECT_SET)
		ns -= p->bias_ns;
	record->flags = proved ? INJECT_GATED : 0;
	record->end_ns = record->start_ns + (uint64_t)(ns > 0 ? ns : 0);
	if (s->frames.count)
		frames_put(&s->frames, record->correlation, record->tid);
	else
		record->flags |= INJECT_NO_STACK;
	sampling_put(record);
	pool_give_back(s);
}
