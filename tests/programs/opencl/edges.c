// SPDX-License-Identifier: Apache-2.0
/*
 * Calls that begin and end oddly. The program brings its own OpenCL entry points, so that it decides
 * what happens inside of a call:
 *
 *   clEnqueueMigrateMemObjects runs the callback    clFinish ends in a jump to clFlush
 *   clEnqueueSVMMigrateMem calls clFlush twice, in a frame below its own
 *
 * edges CASE COUNT [hold]: runs one of the cases below and prints "pid function count" for what
 * returned. With `hold` it prints "ready" and waits for a line before it starts.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define ENTRY_POINT __attribute__((noipa, visibility("default")))

static volatile int work;

ENTRY_POINT int clFlush(void *queue)
{
	work++;
	return 0;
}

ENTRY_POINT int clFinish(void *queue)
{
	work++;
	return clFlush(queue);
}

ENTRY_POINT int clEnqueueMigrateMemObjects(void *program, unsigned n, void *devices,
					   const char *options, void (*notify)(void *, void *),
					   void *data)
{
	if (notify)
		notify(program, data);
	work++;
	return 0;
}

ENTRY_POINT int clEnqueueSVMMigrateMem(void *program)
{
	volatile int status = clFlush(program);

	status += clFlush(program);
	return status;
}

static void report(const char *function, long count)
{
	printf("%d %s %ld\n", getpid(), function, count);
	fflush(stdout);
}

static jmp_buf back;

static void jump_out(void *program, void *data)
{
	longjmp(back, 1);
}

static void fork_inside(void *program, void *data)
{
	fflush(stdout);
	*(pid_t *)data = fork();
}

static void end_thread(void *program, void *data)
{
	syscall(SYS_exit, 0);
}

static void say_and_sleep(void *program, void *data)
{
	puts("inside");
	fflush(stdout);
	sleep(atoi(data));
}

/* One call, `bytes` bytes of stack below the caller's. */
static __attribute__((noinline)) void deeper(size_t bytes)
{
	volatile char room[bytes];

	memset((void *)room, 1, bytes);
	clFlush(NULL);
	room[0]++;
}

static void *flush_many(void *count)
{
	for (long i = 0; i < *(long *)count; i++)
		clFlush(NULL);
	return NULL;
}

static void *end_inside(void *unused)
{
	clEnqueueMigrateMemObjects(NULL, 0, NULL, NULL, end_thread, NULL);
	return NULL;
}

int main(int argc, char **argv)
{
	const char *which = argc > 1 ? argv[1] : "";
	long count = argc > 2 ? atol(argv[2]) : 1;
	volatile long i;

	if (argc > 3 && !strcmp(argv[3], "hold")) {
		puts("ready");
		fflush(stdout);
		if (getchar() == EOF)
			return 1;
	}
	if (!strcmp(which, "jump")) {
		/* Every call is left by a jump; what comes after it, at any depth, counts. */
		for (i = 0; i < count; i++) {
			if (!setjmp(back))
				clEnqueueMigrateMemObjects(NULL, 0, NULL, NULL, jump_out, NULL);
			if (i % 2)
				clFlush(NULL);
			else
				deeper(64 + i % 7 * 512);
		}
		report("clFlush", count);
	} else if (!strcmp(which, "fork")) {
		pid_t child = 0;

		clEnqueueMigrateMemObjects(NULL, 0, NULL, NULL, fork_inside, &child);
		for (i = 0; i < count; i++)
			clFlush(NULL);
		if (!child) {
			report("clFlush", count);
			return 0;
		}
		waitpid(child, NULL, 0);
		report("clEnqueueMigrateMemObjects", 1);
		report("clFlush", count);
	} else if (!strcmp(which, "end")) {
		pthread_t thread;

		for (i = 0; i < count; i++) {
			pthread_create(&thread, NULL, end_inside, NULL);
			pthread_join(thread, NULL);
		}
		clFlush(NULL);
		report("clFlush", 1);
	} else if (!strcmp(which, "tail")) {
		for (i = 0; i < count; i++)
			clFinish(NULL);
		report("clFinish", count);
	} else if (!strcmp(which, "nest")) {
		for (i = 0; i < count; i++)
			clEnqueueSVMMigrateMem(NULL);
		report("clEnqueueSVMMigrateMem", count);
	} else if (!strcmp(which, "threads")) {
		pthread_t threads[8];

		for (i = 0; i < 8; i++)
			pthread_create(&threads[i], NULL, flush_many, &count);
		for (i = 0; i < 8; i++)
			pthread_join(threads[i], NULL);
		report("clFlush", 8 * count);
	} else if (!strcmp(which, "hang")) {
		clEnqueueMigrateMemObjects(NULL, 0, NULL, NULL, say_and_sleep, argv[2]);
		report("clEnqueueMigrateMemObjects", 1);
	} else {
		fprintf(stderr, "no such case: %s\n", which);
		return 2;
	}
	return 0;
}
