// SPDX-License-Identifier: Apache-2.0
// Stands in for libcupti.so: what is switched on, and how many launches the driver saw meanwhile. Hands
// over a record of a call and one of a kernel for each of them, in CUPTI's layout, and, as CUPTI does from
// the second window on, first some kernels of the window before. Ends the program where CUPTI would crash.
// With STUB_CUPTI_THREAD set, a thread hands buffers over all the time, whatever is switched on: CUPTI has
// threads, and what it was given once comes back whenever it likes.
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RUNTIME 5
#define CONCURRENT_KERNEL 10
#define STALE 3

typedef void requested_fn(uint8_t **, size_t *, size_t *);
typedef void completed_fn(void *, uint32_t, uint8_t *, size_t, size_t);

unsigned long stub_all_launches(void);
static _Atomic unsigned kinds;
static unsigned long before, seen, kernels_before;
static requested_fn *_Atomic requested;
static completed_fn *_Atomic completed;
static _Atomic unsigned long buffers;
static uint64_t opened_ns;
static unsigned long waiting; // launches whose records are not handed over yet
static uint32_t next_correlation = 1, windows;
static int subscribed, thread_ids;

struct __attribute__((packed)) kernel {
	uint32_t kind;
	uint8_t unused_1[12];
	uint64_t start, end, completed;
	uint32_t device, context, stream, grid[3], block[3], shared[2];
	uint8_t unused_2[8];
	uint32_t correlation;
	uint64_t number;
	const char *name;
	uint8_t unused_3[32];
	uint64_t node;
	uint8_t unused_4[4];
	uint32_t graph;
	uint8_t unused_5[56];
};
struct call {
	uint32_t kind, id;
	uint64_t start, end;
	uint32_t pid, tid, correlation, result;
};
_Static_assert(sizeof(struct kernel) == 216 && sizeof(struct call) == 40, "as CUPTI 13 has them");

// A clock that is not the host's: it began at another time.
static uint64_t clock_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec + 1000000000000000ull;
}

int cuptiGetVersion(uint32_t *version)
{
	*version = 130001;
	return 0;
}

int cuptiSubscribe(void **subscriber, void *callback, void *data)
{
	(void)callback, (void)data;
	if (getenv("STUB_CUPTI_THREAD"))
		abort(); // Sonde's library never subscribes: it ends programs
	if (subscribed)
		return 39;
	subscribed = 1;
	*subscriber = &subscribed;
	return 0;
}

int cuptiUnsubscribe(void *subscriber)
{
	if (subscriber != &subscribed)
		abort();
	subscribed = 0;
	return 0;
}

int cuptiGetTimestamp(uint64_t *ns)
{
	*ns = clock_ns();
	return 0;
}

int cuptiGetThreadIdType(int *type)
{
	*type = thread_ids;
	return 0;
}

int cuptiSetThreadIdType(int type)
{
	thread_ids = type;
	return 0;
}

int cuptiGetCallbackName(int domain, uint32_t id, const char **name)
{
	if (domain == 2 && id == 211)
		*name = "cudaLaunchKernel_v7000";
	else if (domain == 1 && id == 307)
		*name = "cuLaunchKernel";
	else
		return 1;
	return 0;
}

int cuptiActivityEnableDriverApi(uint32_t id, uint8_t on)
{
	(void)id, (void)on;
	return 0;
}

static void *hand_over_always(void *unused)
{
	struct timespec t = {0, 20000};
	(void)unused;
	for (;; nanosleep(&t, NULL)) {
		uint8_t *buffer;
		size_t size, most;
		requested_fn *wants = atomic_load(&requested);
		completed_fn *gives = atomic_load(&completed);
		wants(&buffer, &size, &most);
		if (!buffer)
			continue;
		uint64_t now = clock_ns();
		struct kernel kernel = {.kind = CONCURRENT_KERNEL,
					.start = now,
					.end = now + 300,
					.stream = 7,
					.name = "_Z7shorterPf"};
		memcpy(buffer, &kernel, sizeof kernel);
		nanosleep(&t, NULL); // the trace may end meanwhile
		gives(NULL, 0, buffer, size, sizeof kernel);
		buffers++;
	}
	return NULL;
}

int cuptiActivityRegisterCallbacks(requested_fn *wants, completed_fn *gives)
{
	static _Atomic int began;
	pthread_t thread;
	requested = wants;
	completed = gives;
	waiting = 0; // what an earlier one did not fetch
	if (getenv("STUB_CUPTI_THREAD") && !began++ &&
	    pthread_create(&thread, NULL, hand_over_always, NULL))
		abort();
	return 0;
}

int cuptiActivityEnable(int kind)
{
	if (kind < 0 || kind > 31)
		return 1;
	if (!kinds) {
		before = stub_all_launches();
		opened_ns = clock_ns();
	}
	if (kind == CONCURRENT_KERNEL)
		kernels_before = stub_all_launches();
	kinds |= 1u << kind;
	return 0;
}

int cuptiActivityDisable(int kind)
{
	if (kind == CONCURRENT_KERNEL && kinds & 1u << kind)
		waiting += stub_all_launches() - kernels_before;
	kinds &= ~(1u << kind);
	if (!kinds)
		seen += stub_all_launches() - before;
	return 0;
}

static int hand_over(unsigned long count, uint32_t first, int with_calls)
{
	size_t each = sizeof(struct kernel) + (with_calls ? sizeof(struct call) : 0);
	for (unsigned long done = 0; done < count;) {
		uint8_t *buffer;
		size_t size, most, valid = 0;
		requested(&buffer, &size, &most);
		if (!buffer)
			return 0;
		for (; done < count && valid + each <= size; done++) {
			uint64_t at = opened_ns + 1000 * done;
			struct call call = {RUNTIME,
					    211,
					    at,
					    at + 500,
					    (uint32_t)getpid(),
					    (uint32_t)getpid(),
					    first + (uint32_t)done,
					    0};
			struct kernel kernel = {.kind = CONCURRENT_KERNEL,
						.start = at + 600,
						.end = at + 900,
						.stream = 7,
						.grid = {2, 3, 1},
						.block = {64, 1, 1},
						.correlation = call.correlation,
						.name = "_Z7shorterPf"};
			if (with_calls) {
				memcpy(buffer + valid, &call, sizeof call);
				valid += sizeof call;
			}
			memcpy(buffer + valid, &kernel, sizeof kernel);
			valid += sizeof kernel;
		}
		completed(NULL, 0, buffer, size, valid);
	}
	return 0;
}

int cuptiActivityFlushAll(uint32_t flag)
{
	(void)flag;
	if (!waiting || !requested)
		return 0;
	unsigned long count = waiting;
	waiting = 0;
	if (windows++)
		hand_over(STALE, next_correlation - STALE, 0);
	hand_over(count, next_correlation, 1);
	next_correlation += (uint32_t)count;
	return 0;
}

int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, uint8_t **record)
{
	if (*record) {
		uint32_t kind;
		memcpy(&kind, *record, sizeof kind);
		*record += kind == RUNTIME ? sizeof(struct call) : sizeof(struct kernel);
	} else {
		*record = buffer;
	}
	return *record < buffer + valid ? 0 : 12;
}

int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped)
{
	(void)context, (void)stream;
	*dropped = 0;
	return 0;
}

int cuptiFinalize(void)
{
	abort(); // no process that replays graphs survives it
}

unsigned stub_kinds(void)
{
	return kinds;
}

unsigned long stub_buffers(void)
{
	return buffers;
}

unsigned long stub_traced(void)
{
	return seen;
}
