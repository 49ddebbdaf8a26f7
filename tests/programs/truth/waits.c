// SPDX-License-Identifier: Apache-2.0
// Threads that wait, each for one known reason, each measuring how long. Prints the truth as JSON:
// {"name": [tid, seconds, calls that wait], ...}; calls are counted of the sleeper. The starved thread reads its run-queue delay from the scheduler's
// own account (schedstat), the others time the call that blocks them.
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile int stop;
static volatile unsigned long sink;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int ends[2];
static pthread_barrier_t ready;

struct truth {
	const char *name;
	pid_t tid;
	double seconds;
	unsigned long calls;
};

static double now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void begin(struct truth *t)
{
	pthread_setname_np(pthread_self(), t->name);
	t->tid = syscall(SYS_gettid);
	pthread_barrier_wait(&ready);
}

static void sleep_ms(long ms)
{
	struct timespec t = {ms / 1000, ms % 1000 * 1000000};

	clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

static void *sleeper(void *arg)
{
	struct truth *t = arg;

	begin(t);
	while (!stop) {
		double began = now_s();

		sleep_ms(37);
		t->seconds += now_s() - began;
		t->calls++;
	}
	return NULL;
}

static void *holder(void *arg)
{
	begin(arg);
	while (!stop) {
		pthread_mutex_lock(&lock);
		sleep_ms(60);
		pthread_mutex_unlock(&lock);
		sleep_ms(5);
	}
	return NULL;
}

static void *futex_waiter(void *arg)
{
	struct truth *t = arg;

	begin(t);
	while (!stop) {
		double began = now_s();

		pthread_mutex_lock(&lock);
		t->seconds += now_s() - began;
		pthread_mutex_unlock(&lock);
		for (int i = 0; i < 1000000; i++)
			sink += i;
	}
	return NULL;
}

static void *pipe_reader(void *arg)
{
	struct truth *t = arg;
	char byte;

	begin(t);
	while (!stop) {
		double began = now_s();

		if (read(ends[0], &byte, 1) != 1)
			break;
		t->seconds += now_s() - began;
	}
	return NULL;
}

static void *pipe_writer(void *arg)
{
	begin(arg);
	while (!stop) {
		sleep_ms(50);
		if (write(ends[1], "x", 1) != 1)
			break;
	}
	return NULL;
}

static double run_delay_s(void)
{
	char path[64], text[128] = {0};
	unsigned long long ran, delayed = 0;
	int fd;

	snprintf(path, sizeof(path), "/proc/self/task/%ld/schedstat", syscall(SYS_gettid));
	fd = open(path, O_RDONLY);
	if (fd >= 0 && read(fd, text, sizeof(text) - 1) > 0)
		sscanf(text, "%llu %llu", &ran, &delayed);
	close(fd);
	return delayed / 1e9;
}

static void *busy(void *arg)
{
	struct truth *t = arg;
	cpu_set_t one;
	double began;

	CPU_ZERO(&one);
	CPU_SET(0, &one);
	sched_setaffinity(0, sizeof(one), &one);
	begin(t);
	began = run_delay_s();
	while (!stop)
		for (int i = 0; i < 1000000; i++)
			sink += i;
	t->seconds = run_delay_s() - began;
	return NULL;
}

int main(int argc, char **argv)
{
	static struct truth truths[] = {
		{.name = "sleeper"},	 {.name = "holder"},	  {.name = "futex_waiter"},
		{.name = "pipe_reader"}, {.name = "pipe_writer"}, {.name = "starved"},
		{.name = "competitor"},
	};
	static void *(*const bodies[])(void *) = {
		sleeper, holder, futex_waiter, pipe_reader, pipe_writer, busy, busy,
	};
	enum { N = sizeof(bodies) / sizeof(bodies[0]) };
	pthread_t threads[N];
	double seconds = argc > 1 ? atof(argv[1]) : 10;

	if (pipe(ends))
		return 1;
	pthread_barrier_init(&ready, NULL, N + 1);
	for (int i = 0; i < N; i++)
		pthread_create(&threads[i], NULL, bodies[i], &truths[i]);
	pthread_barrier_wait(&ready);
	sleep_ms((long)(seconds * 1000));
	stop = 1;
	for (int i = 0; i < N; i++)
		pthread_join(threads[i], NULL);
	printf("{");
	for (int i = 0; i < N; i++)
		printf("%s\"%s\": [%d, %f, %lu]", i ? ", " : "", truths[i].name, truths[i].tid,
		       truths[i].seconds, truths[i].calls);
	printf("}\n");
	return 0;
}
