// SPDX-License-Identifier: Apache-2.0
/*
 * cost COUNT [hold]: ns per call of entry points that do next to nothing, so that what a probe adds
 * can be measured. One "function ns" a line.
 *
 *   clFlush               begins with a load, which is single-stepped under a probe
 *   clFinish              begins with a push, which is emulated
 *   clEnqueueWriteBuffer  the same, with a size and a flag to read
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ENTRY_POINT __attribute__((noipa, visibility("default")))

static volatile int work;

ENTRY_POINT int clFlush(void *queue)
{
	work++;
	return 0;
}

ENTRY_POINT int clFinish(void *queue)
{
	volatile char room[32];

	room[0] = (char)work;
	__asm__ volatile("" ::: "rbx");
	return room[0];
}

ENTRY_POINT int clEnqueueWriteBuffer(void *queue, void *buffer, unsigned blocking, size_t offset,
				     size_t size, const void *host, unsigned n, void *list,
				     void *event)
{
	volatile char room[32];

	room[0] = (char)size;
	__asm__ volatile("" ::: "rbx");
	return room[0] & 0;
}

static double now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 100000;
	double began;

	if (argc > 2 && !strcmp(argv[2], "hold")) {
		puts("ready");
		fflush(stdout);
		if (getchar() == EOF)
			return 1;
	}
	began = now_ns();
	for (long i = 0; i < count; i++)
		clFlush(NULL);
	printf("clFlush %.1f\n", (now_ns() - began) / count);
	began = now_ns();
	for (long i = 0; i < count; i++)
		clFinish(NULL);
	printf("clFinish %.1f\n", (now_ns() - began) / count);
	began = now_ns();
	for (long i = 0; i < count; i++)
		clEnqueueWriteBuffer(NULL, NULL, 1, 0, i, NULL, 0, NULL, NULL);
	printf("clEnqueueWriteBuffer %.1f\n", (now_ns() - began) / count);
	return 0;
}
