// SPDX-License-Identifier: Apache-2.0
/* Maps 4 MiB, touches every page and unmaps it, for ever; writes how many faults it had and its CPU
 * time in seconds, a line each tenth of a second. */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

#define BYTES (4UL << 20)
#define PAGE 4096

static double seconds(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

__attribute__((noinline)) static int churn(void)
{
	volatile char *at =
		mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED)
		return 0;
	for (unsigned long i = 0; i < BYTES; i += PAGE)
		at[i] = 1;
	return !munmap((void *)at, BYTES);
}

int main(void)
{
	double reported_s = seconds(CLOCK_MONOTONIC);
	long rounds = 0;

	while (churn()) {
		rounds++;
		if (seconds(CLOCK_MONOTONIC) < reported_s + 0.1)
			continue;
		reported_s = seconds(CLOCK_MONOTONIC);
		printf("%ld %.6f\n", rounds * (long)(BYTES / PAGE),
		       seconds(CLOCK_PROCESS_CPUTIME_ID));
		fflush(stdout);
	}
	return 1;
}
