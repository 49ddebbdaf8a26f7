// SPDX-License-Identifier: Apache-2.0
// Threads that are cancelled while a launch, or an enqueued wait, blocks in the (stub) driver. Then a
// capture is begun: nobody is in a launch any more, so nothing may hold it up.
//
//     cancel TIMES
//
// Prints how many were cancelled and how long the longest of five captures took to begin, in µs.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void *stub_function(const char *name, uint64_t ns);
int cuInit(unsigned);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		   void *, void **, void **);
int cuStreamCreate(void **, unsigned);
int cuStreamSynchronize(void *);
int cuStreamBeginCapture_v2(void *, int);
int cuStreamEndCapture(void *, void **);

static void *function, *stream;

static uint64_t now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000ull + t.tv_nsec / 1000;
}

static void nap(long ms)
{
	struct timespec t = {0, ms * 1000000};
	nanosleep(&t, NULL);
}

static void *launches(void *arg)
{
	for (;;)
		if (cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL))
			abort();
	return arg;
}

static void *waits(void *arg)
{
	for (;;)
		if (cuStreamSynchronize(stream))
			abort();
	return arg;
}

int main(int argc, char **argv)
{
	int times = argc > 1 ? atoi(argv[1]) : 20, cancelled = 0;
	uint64_t longest = 0;
	cuInit(0);
	function = stub_function("slow", 5000000);
	if (cuStreamCreate(&stream, 1))
		return 2;
	for (int i = 0; i < 100; i++) { // until the library has its hooks and its events
		cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
		nap(10);
	}
	for (int i = 0; i < times; i++) {
		pthread_t thread;
		void *result;
		pthread_create(&thread, NULL, i % 4 == 3 ? waits : launches, NULL);
		nap(30);
		pthread_cancel(thread);
		pthread_join(thread, &result);
		cancelled += result == PTHREAD_CANCELED;
	}
	nap(200); // the library looks after its dead now and then
	for (int i = 0; i < 5; i++) {
		void *side, *graph;
		if (cuStreamCreate(&side, 1))
			return 2;
		uint64_t before = now_us();
		if (cuStreamBeginCapture_v2(side, 0))
			return 2;
		uint64_t took = now_us() - before;
		longest = took > longest ? took : longest;
		if (cuStreamEndCapture(side, &graph))
			return 2;
	}
	printf("%d %lu\n", cancelled, longest);
	return 0;
}
