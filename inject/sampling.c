// SPDX-License-Identifier: Apache-2.0
// Which launches are timed: each by chance, with one that follows the rate asked for.
#include "own.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REFILL_NS 20000000u
#define SMOOTH_S 0.3
#define FIRST_RATE 20000.0 /* launches a second, until it is known */
#define MAX_STRIDE 1000000u
#define LOOK_EVERY 256u

static struct sampling nothing;
struct sampling *sampling = &nothing;
__thread struct thread_sampling self_sampling __attribute__((tls_model("initial-exec")));

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

bool sampling_create(void)
{
	if (sampling != &nothing)
		return true;
	void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (page == MAP_FAILED)
		return false;
	if (madvise(page, 4096, MADV_WIPEONFORK)) { // Linux before 4.14
		munmap(page, 4096);
		return false;
	}
	sampling = page;
	return true;
}

static uint64_t next_random(uint64_t *state)
{ // splitmix64 (Steele, Lea, Flood 2014)
	uint64_t z = *state += 0x9e3779b97f4a7c15ull;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

// The rest is looked at every so often, so that launches are counted soon.
static void look_after(struct thread_sampling *t)
{
	t->left = t->looked = t->rest < LOOK_EVERY ? t->rest : LOOK_EVERY;
	t->rest -= t->left;
}

// -ln of a number in (0, 1], to 1e-5; libm is not ours to load.
static double minus_log(double x)
{
	union {
		double d;
		uint64_t u;
	} of = {x};
	int exponent = (int)(of.u >> 52) - 1023;
	of.u = (of.u & 0xfffffffffffffull) | 0x3ff0000000000000ull;
	double t = (of.d - 1) / (of.d + 1), t2 = t * t; // ln m = 2 artanh t
	double mantissa = 2 * t * (1 + t2 * (1.0 / 3 + t2 * (1.0 / 5 + t2 * (1.0 / 7 + t2 / 9))));
	return -(exponent * 0.69314718055994531 + mantissa);
}

// Launches until the next one to time, if each is chosen by itself with a chance of 1 / drawn: so
// nothing that the program does in step can be in step with it, and the variance is known.
static uint32_t draw(struct thread_sampling *t)
{
	uint32_t n = 1;
	if (t->drawn <= 8) {
		while (next_random(&t->random) % t->drawn)
			n++;
		return n;
	}
	double p = 1.0 / t->drawn, lambda = p + p * p / 2 + p * p * p / 3;
	double u = (double)((next_random(&t->random) >> 11) + 1) * 0x1p-53;
	double strides = minus_log(u) / lambda;
	return strides < 4e9 ? 1 + (uint32_t)strides : 4000000000u;
}

static void begin_thread(struct thread_sampling *t, uint32_t mean, uint32_t epoch)
{
	t->tid = (uint32_t)syscall(SYS_gettid);
	t->random =
		(shared.control->seed ? shared.control->seed : now_ns()) ^ ((uint64_t)t->tid << 32);
	t->drawn = mean, t->epoch = epoch;
	t->rest = draw(t) - 1;
	t->left = t->looked = 1;
}

bool sampling_due(enum inject_type type, uint32_t *weight)
{
	struct thread_sampling *t = &self_sampling;
	if (unlikely(atomic_load_explicit(&sampling->armed, memory_order_acquire) == ARMED_AGAIN)) {
		start_again_after_fork();
		return false;
	}
	uint32_t mean = atomic_load_explicit(&sampling->stride, memory_order_relaxed);
	uint32_t epoch = atomic_load_explicit(&sampling->epoch, memory_order_relaxed);
	if (!mean)
		return false;
	if (!t->random)
		begin_thread(t, mean, epoch);
	atomic_fetch_add_explicit(&sampling->seen, t->looked - t->left + 1, memory_order_relaxed);
	bool due = t->left == 1 && !t->rest;
	*weight = t->drawn;
	bool is_new = t->epoch != epoch;
	if (is_new)
		t->drawn = mean, t->epoch = epoch;
	if (due || is_new)
		t->rest = draw(t);
	look_after(t);
	if (!due)
		return false;
	COUNT(sampled, 1);
	if (atomic_fetch_sub_explicit(&sampling->tokens, 1, memory_order_relaxed) > 0)
		return true;
	atomic_fetch_add_explicit(&sampling->tokens, 1, memory_order_relaxed);
	COUNT(lost_pool, 1);
	sampling_carry(type, *weight);
	return false;
}

// A record carries as much again as it stands for, so that none outweighs the others; and of a heap
// that grows, a part, so that it comes to an end.
#define LEAST_CARRIED 8u
#define PART_CARRIED 16u
#define MOST_CARRIED 1000000u /* the agent takes no record above 4,000,000 for true */

void sampling_carry(unsigned type, double weight)
{
	if (type < INJECT_TYPES)
		atomic_fetch_add_explicit(&sampling->carried[type], (uint64_t)weight,
					  memory_order_relaxed);
}

#define MOST_COST_NS 100000u /* what is longer was time off the CPU, not of ours */

void sampling_cost(uint64_t ns)
{
	COUNT(host_ns, ns < MOST_COST_NS ? ns : MOST_COST_NS);
}

void sampling_put(struct inject_record *record)
{
	uint64_t carried = 0, most = (uint64_t)record->weight;
	if (record->type < INJECT_TYPES)
		carried = atomic_exchange_explicit(&sampling->carried[record->type], 0,
						   memory_order_relaxed);
	if (most < LEAST_CARRIED)
		most = LEAST_CARRIED;
	if (most < carried / PART_CARRIED)
		most = carried / PART_CARRIED;
	if (most > MOST_CARRIED)
		most = MOST_CARRIED;
	if (carried > most) {
		sampling_carry(record->type, (double)(carried - most));
		carried = most;
	}
	record->weight += (double)carried;
	if (shared_put(record))
		COUNT(timed, 1);
	else
		sampling_carry(record->type, record->weight);
}

// What our thread knows of the rate at which launches come.
static struct pace {
	uint64_t last, seen;
	double rate, carried; // launches a second; parts of a token
} pace = {.rate = FIRST_RATE};

// In a forked child: neither the parent's counts nor its thread's number are true there.
void sampling_forget(void)
{
	pace = (struct pace){.rate = FIRST_RATE};
	self_sampling = (struct thread_sampling){0};
}

// By our thread: tokens for the next while, and a stride that fits the rate of launches.
void sampling_refill(uint64_t now)
{
	uint32_t per_second = shared.control->per_second, every = shared.control->every;
	if (per_second > 100000)
		per_second = 100000;
	if (now - pace.last < REFILL_NS)
		return;
	double passed_s = pace.last ? (double)(now - pace.last) / 1e9 : 0.02;
	bool was_off = passed_s > 0.1; // then nothing was counted: the rate is as it was before
	uint64_t seen = atomic_load_explicit(&sampling->seen, memory_order_relaxed);
	double here = (double)(seen - pace.seen) / passed_s;
	pace.last = now, pace.seen = seen;
	if (!was_off)
		pace.rate += (here - pace.rate) * passed_s / SMOOTH_S;
	double stride = every ? every : per_second ? pace.rate / per_second : 0;
	if (!every && per_second && stride < 1)
		stride = 1;
	if (stride > MAX_STRIDE)
		stride = MAX_STRIDE;
	uint32_t wanted = (uint32_t)(stride + 0.5);
	uint32_t current = atomic_load_explicit(&sampling->stride, memory_order_relaxed);
	if (every ? wanted != current :
		    wanted > current + current / 4 || wanted + wanted / 4 < current) {
		atomic_store_explicit(&sampling->stride, wanted, memory_order_relaxed);
		atomic_fetch_add_explicit(&sampling->epoch, 1, memory_order_relaxed);
		SET(every, wanted);
	}
	pace.carried += was_off ? 0 : 1.5 * per_second * passed_s;
	int32_t left = atomic_load_explicit(&sampling->tokens, memory_order_relaxed);
	int32_t most = (int32_t)(per_second / 10) + 4,
		tokens = (left > 0 ? left : 0) + (int32_t)pace.carried;
	pace.carried -= (int32_t)pace.carried;
	atomic_store_explicit(&sampling->tokens,
			      every	    ? 1 << 20 :
			      tokens < most ? tokens :
					      most,
			      memory_order_relaxed);
}
