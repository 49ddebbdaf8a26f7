// SPDX-License-Identifier: Apache-2.0
// PROCESSES processes of THREADS threads each, all of which nap, over and over, for SECONDS.
// Prints "ready" once every thread waits to begin, begins when it reads a line, prints "done" once every
// thread has stopped; its parent kills its process group.
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static struct shared {
	atomic_long waiting, done;
	pid_t parent;
} * shared;
static int gate[2];
static double seconds;
static long nap_us;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void *naps(void *arg)
{
	const struct timespec nap = {nap_us / 1000000, nap_us % 1000000 * 1000};
	double until;
	char c;

	atomic_fetch_add(&shared->waiting, 1);
	if (read(gate[0], &c, 1) < 0) /* until the other end is closed */
		return NULL;
	until = now() + seconds;
	while (now() < until)
		nanosleep(&nap, NULL);
	atomic_fetch_add(&shared->done, 1);
	for (;;)
		pause();
}

static void process(long threads)
{
	pthread_attr_t attributes;
	pthread_t thread;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	signal(SIGALRM, SIG_DFL);
	alarm(120); /* in any case */
	if (getppid() != shared->parent)
		_exit(0);
	close(gate[1]);
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 32768);
	for (long i = 1; i < threads; i++)
		if (pthread_create(&thread, &attributes, naps, NULL))
			_exit(1);
	naps(NULL);
}

static void await(atomic_long *count, long all)
{
	const struct timespec moment = {0, 20000000};

	while (atomic_load(count) < all)
		nanosleep(&moment, NULL);
}

int main(int argc, char **argv)
{
	long processes = argc > 1 ? atol(argv[1]) : 1500, threads = argc > 2 ? atol(argv[2]) : 6;

	seconds = argc > 3 ? atof(argv[3]) : 4;
	nap_us = argc > 4 ? atol(argv[4]) : 400000;
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	if (shared == MAP_FAILED || pipe(gate))
		return 1;
	shared->parent = getpid();
	for (long i = 0; i < processes; i++) {
		pid_t child = fork();

		if (child < 0)
			return 1;
		if (!child)
			process(threads);
	}
	await(&shared->waiting, processes * threads);
	puts("ready");
	fflush(stdout);
	getchar();
	close(gate[0]);
	close(gate[1]);
	await(&shared->done, processes * threads);
	puts("done");
	fflush(stdout);
	getchar();
	return 0;
}
