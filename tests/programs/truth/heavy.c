// SPDX-License-Identifier: Apache-2.0
// Three threads share one CPU. "busy" and "partner" pass a byte to and fro, some hundred thousand waits a second;
// after each 40 ms, by turns, "busy" polls for 30 ms or takes a lock that is held for 5 ms. "rare" sleeps for 2 ms,
// again and again. argv[1]: for how many seconds. Prints the truth as JSON, for each thread: name: [tid, seconds in
// poll, lock or sleep, how often], and how often "busy" waited in all.
#define _GNU_SOURCE
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int there[2], back[2];
static double until_s, poll_s, lock_s, sleep_s;
static long polls, locks, sleeps, waited;
static pid_t busy_tid, rare_tid;

static double now_s(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void *partner(void *unused)
{
	char byte;

	while (read(there[0], &byte, 1) == 1)
		if (write(back[1], &byte, 1) != 1)
			break;
	return unused;
}

static void *busy(void *unused)
{
	const struct timespec held = {.tv_nsec = 5000000};
	struct rusage before, after;
	int lock = 0;
	char byte = 'x';

	busy_tid = (pid_t)syscall(SYS_gettid);
	getrusage(RUSAGE_THREAD, &before);
	for (long turn = 0; now_s() < until_s; turn++) {
		for (double end_s = now_s() + 0.04, at_s = 0; at_s < end_s; at_s = now_s())
			if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1)
				return unused;
		double began_s = now_s();
		if (turn % 2) {
			poll(NULL, 0, 30);
			poll_s += now_s() - began_s;
			polls++;
		} else {
			syscall(SYS_futex, &lock, FUTEX_WAIT_PRIVATE, 0, &held, NULL, 0);
			lock_s += now_s() - began_s;
			locks++;
		}
	}
	getrusage(RUSAGE_THREAD, &after);
	waited = after.ru_nvcsw - before.ru_nvcsw;
	close(there[1]);
	return unused;
}

static void *rare(void *unused)
{
	const struct timespec for_2_ms = {.tv_nsec = 2000000};

	rare_tid = (pid_t)syscall(SYS_gettid);
	while (now_s() < until_s) {
		double began_s = now_s();
		nanosleep(&for_2_ms, NULL);
		sleep_s += now_s() - began_s;
		sleeps++;
	}
	return unused;
}

int main(int argc, char **argv)
{
	void *(*const work[])(void *) = {busy, partner, rare};
	pthread_t threads[3];
	cpu_set_t one;

	until_s = now_s() + (argc > 1 ? atof(argv[1]) : 5);
	CPU_ZERO(&one);
	CPU_SET(0, &one);
	sched_setaffinity(0, sizeof(one), &one);
	if (pipe(there) || pipe(back))
		return 1;
	for (int k = 0; k < 3; k++)
		pthread_create(&threads[k], NULL, work[k], NULL);
	for (int k = 0; k < 3; k++)
		pthread_join(threads[k], NULL);
	printf("{\"poll\": [%d, %f, %ld], \"futex\": [%d, %f, %ld], \"sleep\": [%d, %f, %ld], "
	       "\"waited\": %ld}\n",
	       busy_tid, poll_s, polls, busy_tid, lock_s, locks, rare_tid, sleep_s, sleeps, waited);
	return 0;
}
