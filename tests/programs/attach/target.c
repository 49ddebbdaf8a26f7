// SPDX-License-Identifier: Apache-2.0
// Programs in states in which nothing may be attached, or may.
//
//   target busy|futex|little-stack|own-stack|sleep|backwards|handler|leaderless
//   target loading LIBRARY   one thread is inside dlopen
//   target leaderless        main() ends by pthread_exit(): the process ends with its last thread
//
// Prints "ready" and stays so until its standard input closes (seen by a thread that is itself never
// to be borrowed: it spins slowly on its own CPU time, or waits in a futex).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static atomic_int over;

static void nap(long ms)
{
	struct timespec t = {ms / 1000, ms % 1000 * 1000000};
	nanosleep(&t, NULL);
}

static void *sleeps(void *arg)
{
	(void)arg;
	while (!over)
		nap(5);
	return NULL;
}

// Sleeps with the direction flag set, which the calling convention wants clear in every function.
static void *sleeps_backwards(void *arg)
{
	struct timespec t = {0, 5000000};
	while (!over) {
		long call = SYS_nanosleep;
		unsigned long flags;
		__asm__ volatile("std; syscall; pushfq; pop %1; cld"
				 : "+a"(call), "=r"(flags)
				 : "D"(&t), "S"(NULL)
				 : "rcx", "r11", "cc", "memory");
		if (!(flags & 0x400))
			abort();
	}
	return arg;
}

static void on_signal(int number)
{
	volatile char deep[64 * 1024]; // between the stack pointer and the frame of the signal
	deep[0] = (char)number;
	while (!over)
		nap(5);
	deep[1] = deep[0];
}

static void *in_handler(void *arg)
{
	signal(SIGUSR1, on_signal);
	raise(SIGUSR1);
	return arg;
}

static void *spins(void *arg)
{
	(void)arg;
	while (!over)
		sched_yield();
	return NULL;
}

static ucontext_t back, other;
static void on_other_stack(void)
{
	while (!over)
		nap(5);
	swapcontext(&other, &back);
}

static void *on_own_stack(void *arg)
{
	getcontext(&other);
	other.uc_stack.ss_sp =
		mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	other.uc_stack.ss_size = 1 << 20;
	other.uc_link = &back;
	makecontext(&other, on_other_stack, 0);
	swapcontext(&back, &other);
	return arg;
}

static const char *library;
static void *loads(void *arg)
{
	if (!dlopen(library, RTLD_NOW))
		abort();
	return arg;
}

static void *ends(void *arg)
{
	char c;
	fcntl(0, F_SETFL, O_NONBLOCK);
	while (read(0, &c, 1) != 0) // not blocking: this thread never sleeps in a call
		sched_yield();
	over = 1;
	return arg;
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "sleep";
	pthread_t thread, ender;
	pthread_attr_t attributes;
	void *(*body)(void *) = spins;
	pthread_attr_init(&attributes);
	if (!strcmp(mode, "little-stack")) {
		pthread_attr_setstacksize(&attributes, 64 * 1024);
		body = sleeps;
	} else if (!strcmp(mode, "own-stack")) {
		body = on_own_stack;
	} else if (!strcmp(mode, "loading")) {
		library = argv[2];
		body = loads;
	} else if (!strcmp(mode, "handler")) {
		body = in_handler;
	} else if (!strcmp(mode, "backwards")) {
		body = sleeps_backwards;
	} else if (!strcmp(mode, "sleep") || !strcmp(mode, "leaderless")) {
		body = sleeps;
	}
	if (pthread_create(&ender, NULL, ends, NULL))
		return 1;
	if (strcmp(mode, "futex") && pthread_create(&thread, &attributes, body, NULL))
		return 1;
	printf("ready\n");
	fflush(stdout);
	pthread_join(ender, NULL); // a futex
	if (!strcmp(mode, "leaderless"))
		pthread_exit(NULL);
	if (strcmp(mode, "futex"))
		pthread_join(thread, NULL);
	return 0;
}
