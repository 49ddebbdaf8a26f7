// SPDX-License-Identifier: Apache-2.0
// few_waits THREADS SECONDS: many threads that each wait 12 times a second, and so together very often, all on
// one CPU.
// Prints how often they waited, as JSON: {"waits": N}.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static volatile int stop;
static unsigned long waits;

static void *sleeper(void *arg)
{
	struct timespec t = {0, 79000000};
	unsigned long mine = 0;

	while (!stop) {
		clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
		mine++;
	}
	__sync_fetch_and_add(&waits, mine);
	return arg;
}

int main(int argc, char **argv)
{
	int n = argc > 1 ? atoi(argv[1]) : 400;
	struct timespec t = {argc > 2 ? atoi(argv[2]) : 5, 0};
	cpu_set_t may, one;
	int cpu = 0;
	pthread_t *threads = calloc(n, sizeof(*threads));

	sched_getaffinity(0, sizeof(may), &may);
	while (!CPU_ISSET(cpu, &may))
		cpu++;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	sched_setaffinity(0, sizeof(one), &one);
	for (int i = 0; i < n; i++)
		if (pthread_create(&threads[i], NULL, sleeper, NULL))
			return 1;
	nanosleep(&t, NULL);
	stop = 1;
	for (int i = 0; i < n; i++)
		pthread_join(threads[i], NULL);
	printf("{\"waits\": %lu}\n", waits);
	return 0;
}
