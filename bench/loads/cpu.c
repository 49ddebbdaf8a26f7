// SPDX-License-Identifier: Apache-2.0
// Keeps every CPU busy: one thread a CPU, pinned, counting units of work in a shared file.
//
//     cpu FILE CPUS
//
// FILE holds a u64 for each thread, 64 bytes apart.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static volatile uint64_t *counters;

/* Calls a few deep, so that a stack has something to show. */
static __attribute__((noinline)) uint64_t mix(uint64_t x)
{
	for (int i = 0; i < 4000; i++)
		x = x * 6364136223846793005ULL + 1442695040888963407ULL;
	return x;
}

static __attribute__((noinline)) uint64_t unit(uint64_t x)
{
	return mix(x) ^ mix(x + 1);
}

static void *work(void *arg)
{
	long cpu = (long)arg;
	uint64_t x = cpu;
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	sched_setaffinity(0, sizeof(one), &one);
	for (;;) {
		x = unit(x);
		counters[8 * cpu] += 1 + (x == 0);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	long cpus = argc > 2 ? atol(argv[2]) : 1;
	int fd = open(argv[1], O_RDWR);
	pthread_t thread;

	counters = mmap(NULL, 64 * cpus, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (counters == MAP_FAILED)
		return 1;
	for (long cpu = 1; cpu < cpus; cpu++)
		pthread_create(&thread, NULL, work, (void *)cpu);
	work((void *)0);
	return 0;
}
