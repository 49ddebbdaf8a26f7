// SPDX-License-Identifier: Apache-2.0
// Burns CPU time in as many different stacks as possible: two functions call one another in an order
// that is drawn again each time. Prints the CPU time it used as JSON: {"seconds": s}.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static volatile unsigned long sink;

static double cpu_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void left(unsigned path, int depth);
static void right(unsigned path, int depth);

#define STEP(name)                                                                                 \
	static __attribute__((noinline)) void name(unsigned path, int depth)                       \
	{                                                                                          \
		if (!depth)                                                                        \
			for (int i = 0; i < 20000; i++)                                            \
				sink += i;                                                         \
		else if (path & 1)                                                                 \
			left(path >> 1, depth - 1);                                                \
		else                                                                               \
			right(path >> 1, depth - 1);                                               \
		sink++; /* no tail call */                                                         \
	}

STEP(left)
STEP(right)

int main(int argc, char **argv)
{
	double want = argc > 1 ? atof(argv[1]) : 3;
	unsigned seed = 1;

	while (cpu_s() < want)
		left(rand_r(&seed), 24);
	printf("{\"seconds\": %f}\n", cpu_s());
	return 0;
}
