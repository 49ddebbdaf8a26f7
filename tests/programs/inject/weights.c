// SPDX-License-Identifier: Apache-2.0
// The library's own code for weights and pairs, on a driver of a few lines: prints what becomes of what was
// chosen and could not be timed. One line a case: NAME and numbers.
#include <stdio.h>
#include <string.h>

#include "../../../inject/sampling.c"

#include "../../../inject/cuda_pair.c"

static struct inject_control control;
static struct inject_state state;
static struct inject_record put;
static bool has_room = true;
static unsigned given_back;
struct shared shared = {.control = &control, .state = &state};
struct driver driver;

bool shared_put(struct inject_record *record)
{
	put = *record;
	return has_room;
}

void start_again_after_fork(void)
{
}

void frames_put(const struct frames *frames, uint64_t correlation, uint32_t tid)
{
}

bool pool_gated(struct pool *pool)
{
	return false;
}

void bias_enqueue(struct pool *pool, const struct sample *behind, cu_stream stream)
{
	(void)pool, (void)behind, (void)stream;
}
void pool_give_back(struct sample *s)
{
	given_back++;
	atomic_store(&s->state, SAMPLE_FREE);
}

static cu_result queried, elapsed, recorded;
static float took_ms;

static cu_result query(cu_event event)
{
	return queried;
}

static cu_result elapse(float *ms, cu_event begin, cu_event end)
{
	*ms = took_ms;
	return elapsed;
}

static cu_result record(cu_event event, cu_stream stream)
{
	return recorded;
}

static cu_result exchange(int *mode)
{
	return CU_OK;
}

static struct inject_record stands_for(unsigned type, float weight)
{
	struct inject_record made = {0};
	made.type = type;
	made.weight = weight;
	return made;
}

static double after_carrying(unsigned type, uint64_t carried, float weight)
{
	struct inject_record one = stands_for(type, weight);
	atomic_store(&sampling->carried[type], 0);
	sampling_carry(type, (double)carried);
	sampling_put(&one);
	return put.weight;
}

static uint64_t left(unsigned type)
{
	return atomic_load(&sampling->carried[type]);
}

static void carrying(void)
{
	const struct {
		uint64_t carried;
		float weight;
	} of[] = {{0, 5}, {3, 5}, {8, 5}, {9, 5}, {20, 5}, {30, 20}, {1600, 5}, {100000000, 5}};
	for (unsigned n = 0; n < sizeof(of) / sizeof(of[0]); n++) {
		double weight = after_carrying(INJECT_KERNEL, of[n].carried, of[n].weight);
		printf("carried %lu %.0f %.0f %lu\n", (unsigned long)of[n].carried, of[n].weight,
		       weight, (unsigned long)left(INJECT_KERNEL));
	}
	after_carrying(INJECT_COPY, 7, 1);
	sampling_carry(INJECT_SET, 4);
	struct inject_record kernel = stands_for(INJECT_KERNEL, 2);
	atomic_store(&sampling->carried[INJECT_KERNEL], 0);
	sampling_put(&kernel);
	printf("other-type %.0f %lu\n", put.weight, (unsigned long)left(INJECT_SET));
	has_room = false;
	kernel = stands_for(INJECT_KERNEL, 11);
	state.timed = 0;
	sampling_put(&kernel);
	printf("no-room %lu %lu\n", (unsigned long)left(INJECT_KERNEL), (unsigned long)state.timed);
	has_room = true;
}

// Tokens are used up: what is chosen is carried, by its whole weight, and counted.
static void without_tokens(void)
{
	uint32_t weight = 0;
	control.seed = 5;
	atomic_store(&sampling->carried[INJECT_KERNEL], 0);
	atomic_store(&sampling->stride, 10);
	atomic_store(&sampling->epoch, 1);
	atomic_store(&sampling->tokens, 3);
	unsigned timed = 0;
	double sum = 0;
	for (int n = 0; n < 1000; n++)
		if (sampling_due(INJECT_KERNEL, &weight)) {
			timed++;
			sum += weight;
		}
	printf("tokens %u %.0f %lu %lu\n", timed, sum, (unsigned long)left(INJECT_KERNEL),
	       (unsigned long)state.lost_pool);
}

static void read_one(const char *name, cu_result at_query, cu_result at_elapsed, float ms,
		     bool timed_out, bool unproved)
{
	static struct pool pool;
	static struct gate_state gate;
	struct sample s = {.gated = timed_out, .unproved = unproved, .gate = &gate};
	memset(&pool, 0, sizeof(pool));
	gate.timed_out = timed_out;
	s.record = stands_for(INJECT_KERNEL, 6);
	s.record.start_ns = 1000;
	queried = at_query, elapsed = at_elapsed, took_ms = ms;
	atomic_store(&sampling->carried[INJECT_KERNEL], 0);
	state.lost_order = state.timed = 0, given_back = 0;
	pair_read(&pool, &s);
	printf("%s %lu %lu %lu %u\n", name, (unsigned long)left(INJECT_KERNEL),
	       (unsigned long)state.lost_order, (unsigned long)state.timed, given_back);
}

static void end_one(const char *name, cu_result at_record, bool launched, bool unproved)
{
	static struct pool pool;
	static struct sample s;
	memset(&pool, 0, sizeof(pool));
	memset(&s, 0, sizeof(s));
	s.unproved = unproved;
	recorded = at_record, state.lost_pool = 0, given_back = 0;
	pair_end(&pool, &s, NULL, launched);
	printf("%s %lu %u %u\n", name, (unsigned long)state.lost_pool, given_back,
	       atomic_load(&s.state) == SAMPLE_QUEUED);
}

int main(void)
{
	if (!sampling_create())
		return 1;
	driver.cuEventQuery = query;
	driver.cuEventElapsedTime = elapse;
	driver.cuEventRecord = record;
	driver.cuThreadExchangeStreamCaptureMode = exchange;
	carrying();
	without_tokens();
	read_one("read-good", CU_OK, CU_OK, 0.01f, false, false);
	read_one("read-not-ready", CU_NOT_READY, CU_OK, 0.01f, false, false);
	read_one("read-negative", CU_OK, CU_OK, -1, false, false);
	read_one("read-timed-out", CU_OK, CU_OK, 0.01f, true, false);
	read_one("read-unproved", CU_OK, CU_OK, 0.01f, false, true);
	read_one("read-no-time", CU_OK, 1, 0.01f, false, false);
	end_one("end-good", CU_OK, true, false);
	end_one("end-unproved", CU_OK, true, true);
	end_one("end-not-launched", CU_OK, false, false);
	end_one("end-not-recorded", 1, true, false);
	return 0;
}
