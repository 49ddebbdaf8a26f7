// SPDX-License-Identifier: Apache-2.0
// Calls a function of the (stub) driver that does nothing, again and again; prints ns a call.
//
//     hook_cost CALLS
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int cuInit(unsigned);
int cuMemsetD8Async(uint64_t, unsigned char, size_t, void *);

static double now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e9 + now.tv_nsec;
}

static double each_ns(long calls)
{
	double began = now_ns();
	for (long i = 0; i < calls; i++)
		cuMemsetD8Async(0, 0, 1, NULL);
	return (now_ns() - began) / calls;
}

int main(int argc, char **argv)
{
	long calls = argc > 1 ? atol(argv[1]) : 20000000;
	struct timespec t = {0, 500000000};
	cuInit(0);
	nanosleep(&t, NULL); // hooks are in by now
	each_ns(calls / 10);
	printf("%.2f\n", each_ns(calls));
	return 0;
}
