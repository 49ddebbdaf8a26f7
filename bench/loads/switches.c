// SPDX-License-Identifier: Apache-2.0
// Switches a stated number of times a second, evenly, and works a little in between.
//
//     switches FILE CPUS SWITCHES_PER_SECOND
//
// On every CPU two threads are pinned. Each millisecond one of them wakes, passes a byte to the other
// one and back as often as the schedule has it (two switches each time), works, and sleeps again (one
// more). The CPU is not kept busy: on current kernels a pair that is would starve all others.
//
// FILE holds for each CPU, 64 bytes apart, a u64 of units of work and one of the ns that they took.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static volatile uint64_t *counters;
static double rounds_per_ms;

struct pair {
	long cpu;
	int there[2], back[2];
};

static void pin(long cpu)
{
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	sched_setaffinity(0, sizeof(one), &one);
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

static __attribute__((noinline)) uint64_t unit(uint64_t x)
{
	for (int i = 0; i < 4000; i++)
		x = x * 6364136223846793005ULL + 1442695040888963407ULL;
	return x;
}

static void *echo(void *arg)
{
	struct pair *p = arg;
	char byte;

	pin(p->cpu);
	while (read(p->there[0], &byte, 1) == 1 && write(p->back[1], &byte, 1) == 1)
		;
	return NULL;
}

static void *work(void *arg)
{
	struct pair *p = arg;
	uint64_t x = p->cpu;
	struct timespec wake;
	double due = 0;
	char byte = 'x';

	pin(p->cpu);
	clock_gettime(CLOCK_MONOTONIC, &wake);
	for (;;) {
		uint64_t began;

		wake.tv_nsec += 1000000;
		if (wake.tv_nsec >= 1000000000) {
			wake.tv_nsec -= 1000000000;
			wake.tv_sec++;
		}
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &wake, NULL);
		began = now_ns();
		for (due += rounds_per_ms; due >= 1; due--)
			if (write(p->there[1], &byte, 1) != 1 || read(p->back[0], &byte, 1) != 1)
				exit(1);
		for (int i = 0; i < 20; i++)
			x = unit(x);
		counters[8 * p->cpu + 1] += now_ns() - began;
		counters[8 * p->cpu] += 1 + (x == 0);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	long cpus = argc > 3 ? atol(argv[2]) : 1;
	struct pair pairs[1024];
	pthread_t thread;

	if (argc < 4 || cpus > 1024)
		return 2;
	rounds_per_ms = (atof(argv[3]) / cpus / 1000 - 1) / 2;
	counters =
		mmap(NULL, 64 * cpus, PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[1], O_RDWR), 0);
	if (counters == MAP_FAILED)
		return 1;
	for (long cpu = 0; cpu < cpus; cpu++) {
		pairs[cpu].cpu = cpu;
		if (pipe(pairs[cpu].there) || pipe(pairs[cpu].back))
			return 1;
		pthread_create(&thread, NULL, echo, &pairs[cpu]);
		if (cpu)
			pthread_create(&thread, NULL, work, &pairs[cpu]);
	}
	work(&pairs[0]);
	return 0;
}
