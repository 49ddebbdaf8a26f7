// SPDX-License-Identifier: Apache-2.0
// device_steps STEPS [FILE | hold]: what a decoding loop asks of a device, without one: some 120 us of work, then a call
// that flushes, one that copies, and one that waits, which calls another; of each thousandth step a buffer is made. STEPS 0:
// for ever. Ends with how often each was called, one "function calls" a line. FILE takes u64 units (100 steps) and
// u64 CLOCK_MONOTONIC ns at the last one. hold: prints "ready", and waits for a line.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ENTRY_POINT __attribute__((noipa, visibility("default")))
#define STEPS_OF_A_UNIT 100
#define STEPS_OF_A_BUFFER 1000
#define WORK 60000

static volatile long spent;
static unsigned long flushes, copies, waits, inner_waits, buffers;

/* A frame whose prologue begins with a push, as those of real runtimes do. */
#define FRAME                                                                                      \
	volatile char room[32];                                                                    \
	room[0] = 0;                                                                               \
	__asm__ volatile("" ::: "rbx")

ENTRY_POINT int clFlush(void *queue)
{
	FRAME;
	flushes++;
	return room[0];
}

ENTRY_POINT int clEnqueueCopyBuffer(void *queue, void *from, void *to, size_t at, size_t into,
				    size_t size, unsigned n, void *list, void *event)
{
	FRAME;
	copies++;
	return room[0];
}

ENTRY_POINT int clWaitForEvents(unsigned n, void *list)
{
	FRAME;
	inner_waits++;
	return room[0];
}

ENTRY_POINT int clFinish(void *queue)
{
	FRAME;
	waits++;
	return clWaitForEvents(1, queue) + room[0];
}

ENTRY_POINT void *clCreateBuffer(void *context, unsigned long flags, size_t size, void *host,
				 int *status)
{
	FRAME;
	buffers++;
	if (status)
		*status = room[0];
	return (void *)&spent;
}

static void step(unsigned long number)
{
	int status;

	for (long i = 0; i < WORK; i++)
		spent += i;
	clFlush(NULL);
	clEnqueueCopyBuffer(NULL, NULL, NULL, 0, 0, 4096, 0, NULL, NULL);
	clFinish(NULL);
	if (number % STEPS_OF_A_BUFFER == 0)
		clCreateBuffer(NULL, 0, 1 << 20, NULL, &status);
}

int main(int argc, char **argv)
{
	unsigned long steps = argc > 1 ? strtoul(argv[1], NULL, 10) : 10000;
	uint64_t nowhere[2], *progress = nowhere;
	struct timespec now;
	char line[8];

	if (argc > 2 && !strcmp(argv[2], "hold")) {
		puts("ready");
		fflush(stdout);
		if (!fgets(line, sizeof line, stdin))
			return 1;
	} else if (argc > 2) {
		int file = open(argv[2], O_RDWR);
		progress = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		if (file < 0 || progress == MAP_FAILED)
			return 1;
	}
	for (unsigned long number = 0; !steps || number < steps; number++) {
		step(number);
		if (number % STEPS_OF_A_UNIT == STEPS_OF_A_UNIT - 1) {
			clock_gettime(CLOCK_MONOTONIC, &now);
			progress[1] = now.tv_sec * 1000000000UL + now.tv_nsec;
			progress[0]++;
		}
	}
	printf("clFlush %lu\nclEnqueueCopyBuffer %lu\nclFinish %lu\n"
	       "clWaitForEvents %lu\nclCreateBuffer %lu\n",
	       flushes, copies, waits, inner_waits, buffers);
	return 0;
}
