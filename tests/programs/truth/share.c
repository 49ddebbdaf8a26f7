// SPDX-License-Identifier: Apache-2.0
// Two functions share one thread's CPU time 75:25. Prints the truth as JSON when it ends.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static volatile unsigned long sink;

static double cpu_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

#define BURN(name)                                                                                 \
	__attribute__((noinline)) double name(double seconds)                                      \
	{                                                                                          \
		double began = cpu_s(), now = began;                                               \
                                                                                                   \
		while (now - began < seconds) {                                                    \
			for (int i = 0; i < 200000; i++)                                           \
				sink += i;                                                         \
			now = cpu_s();                                                             \
		}                                                                                  \
		return now - began;                                                                \
	}

BURN(three_quarters)
BURN(one_quarter)

int main(int argc, char **argv)
{
	double want = argc > 1 ? atof(argv[1]) : 10, a = 0, b = 0;
	unsigned seed = 1;

	while (a + b < want) {
		/* Uneven turns, so that no sampling clock can fall into step with them. */
		double turn = 0.001 + rand_r(&seed) % 1000 / 50000.0;

		a += three_quarters(3 * turn);
		b += one_quarter(turn);
	}
	printf("{\"three_quarters\": %f, \"one_quarter\": %f}\n", a, b);
	return 0;
}
