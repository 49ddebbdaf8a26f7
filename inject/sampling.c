// SPDX-License-Identifier: Apache-2.0
// Which launches are timed: each with the same probability, which follows the requested rate.
#include "internal.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REFILL_NS 20000000u /* least time between two refills */
#define SMOOTH_S 0.3	    /* over so long the rate of launches is smoothed */
#define FIRST_RATE 20000.0  /* launches a second, until it is known; */
#define FIRST_S 0.02	    /* as if it had been watched for so long */
#define MAX_STRIDE 1000000u
#define LOOK_EVERY 256u /* launches of a thread after which they are added to sampling->seen */

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

// Begin a countdown of LOOK_EVERY launches at most, so that launches are counted soon.
static void begin_countdown(struct draw *of)
{
	of->left = of->looked = (uint16_t)(of->rest < LOOK_EVERY ? of->rest : LOOK_EVERY);
	of->rest -= of->left;
}

// Choose the next launch to time: one of each block of `drawn` launches of a type, at random. So each launch has the
// same probability, no period of the program can coincide with the sampling, and the sum of weights is the count of
// launches to within a block. That holds, too, for the part of a block that a new stride has cut off.
static void draw(struct thread_sampling *t, struct draw *of)
{
	uint32_t place = (uint32_t)(next_random(&t->random) % t->drawn);
	of->rest = of->after + place + 1;
	of->after = t->drawn - place - 1;
}

static void draw_again(struct thread_sampling *t, uint32_t mean, uint32_t epoch)
{
	t->drawn = mean, t->epoch = epoch;
	for (int type = 1; type < SAMPLED_TYPES; type++) {
		struct draw *of = &t->of[type];
		uint32_t counted = (uint32_t)(of->looked - of->left);
		atomic_fetch_add_explicit(&sampling->seen, counted, memory_order_relaxed);
		of->after = 0;
		draw(t, of);
		begin_countdown(of);
	}
}

static void begin_thread(struct thread_sampling *t, uint32_t mean, uint32_t epoch)
{
	t->tid = (uint32_t)syscall(SYS_gettid);
	t->random =
		(shared.control->seed ? shared.control->seed : now_ns()) ^ ((uint64_t)t->tid << 32);
	draw_again(t, mean, epoch);
}

bool sampling_due(enum inject_type type, uint32_t *weight)
{
	struct thread_sampling *t = &self_sampling;
	struct draw *of = &t->of[type];
	if (unlikely(atomic_load_explicit(&sampling->armed, memory_order_acquire) == ARMED_AGAIN)) {
		start_again_after_fork();
		return false;
	}
	// The epoch first: a stride that is newer than it is drawn with again at the next launch.
	uint32_t epoch = atomic_load_explicit(&sampling->epoch, memory_order_acquire);
	uint32_t mean = atomic_load_explicit(&sampling->stride, memory_order_relaxed);
	if (!mean)
		return false;
	if (!t->random)
		begin_thread(t, mean, epoch);
	else if (t->epoch != epoch)
		draw_again(t, mean, epoch);
	if (of->left > 1) { // drawn just now, and this one is not it
		of->left--;
		return false;
	}
	atomic_fetch_add_explicit(&sampling->seen, of->looked, memory_order_relaxed);
	bool due = !of->rest;
	*weight = t->drawn;
	if (due)
		draw(t, of);
	begin_countdown(of);
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

// A record is given at most as much carried weight as it stands for itself (or LEAST_CARRIED), so that none outweighs
// the others; but at least a 16th of what has piled up, so that it gets less. The agent discards a record of a weight
// above 10,000,000 (MAX_WEIGHT of collect/inject_records.py), hence MAX_STRIDE and MOST_CARRIED.
#define LEAST_CARRIED 8u
#define PART_CARRIED 16u
#define MOST_CARRIED 1000000u

void sampling_carry(unsigned type, double weight)
{
	if (type < INJECT_TYPES)
		atomic_fetch_add_explicit(&sampling->carried[type], (uint64_t)weight,
					  memory_order_relaxed);
}

#define MOST_COST_NS 100000u /* what is longer is taken for time off the CPU */

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
	uint64_t last, seen;	    // time of the last refill (0: none), and sampling->seen then
	double rate, part_of_token; // launches a second; what is left of a token that is not whole
	double known_s;		    // how long the rate was watched, up to SMOOTH_S
} pace = {.rate = FIRST_RATE, .known_s = FIRST_S};

// In a forked child: neither the parent's counts nor its tid hold there.
void sampling_forget(void)
{
	pace = (struct pace){.rate = FIRST_RATE, .known_s = FIRST_S};
	self_sampling = (struct thread_sampling){0};
}

void sampling_rest(void)
{
	pace.last = 0;
}

static void learn_rate(uint64_t seen, double passed_s)
{
	double recent = (double)(seen - pace.seen) / passed_s;
	pace.known_s = pace.known_s + passed_s < SMOOTH_S ? pace.known_s + passed_s : SMOOTH_S;
	pace.rate += (recent - pace.rate) * (passed_s < pace.known_s ? passed_s / pace.known_s : 1);
}

// Our thread may come late, where it got no CPU. There are 1.5 tokens for each launch that is to be timed, and room for
// those of about 0.1 s (`most`).
void sampling_refill(uint64_t now)
{
	uint32_t per_second = shared.control->per_second, every = shared.control->every;
	if (per_second > 100000)
		per_second = 100000;
	if (now - pace.last < REFILL_NS)
		return;
	double passed_s = pace.last ? (double)(now - pace.last) / 1e9 : REFILL_NS / 1e9;
	uint64_t seen = atomic_load_explicit(&sampling->seen, memory_order_relaxed);
	if (pace.last)
		learn_rate(seen, passed_s);
	pace.last = now, pace.seen = seen;
	double stride = every ? every : per_second ? pace.rate / per_second : 0;
	if (!every && per_second && stride < 1)
		stride = 1;
	if (stride > MAX_STRIDE)
		stride = MAX_STRIDE;
	uint32_t wanted = (uint32_t)(stride + 0.5);
	if (!wanted) // nothing is requested: hooks count no launches
		sampling_rest();
	uint32_t current = atomic_load_explicit(&sampling->stride, memory_order_relaxed);
	if (every ? wanted != current :
		    wanted > current + current / 4 || wanted + wanted / 4 < current) {
		atomic_store_explicit(&sampling->stride, wanted, memory_order_relaxed);
		atomic_fetch_add_explicit(&sampling->epoch, 1, memory_order_release);
		SET(every, wanted);
	}
	pace.part_of_token += 1.5 * per_second * (passed_s < 1 ? passed_s : 1);
	int32_t left = atomic_load_explicit(&sampling->tokens, memory_order_relaxed);
	int32_t most = (int32_t)(per_second / 10) + 4,
		tokens = (left > 0 ? left : 0) + (int32_t)pace.part_of_token;
	pace.part_of_token -= (int32_t)pace.part_of_token;
	atomic_store_explicit(&sampling->tokens,
			      every	    ? 1 << 20 :
			      tokens < most ? tokens :
					      most,
			      memory_order_relaxed);
}
