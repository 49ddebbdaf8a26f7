// SPDX-License-Identifier: Apache-2.0
// Two threads pass a byte to and fro through pipes, COUNT times: two waits a round, one a thread.
// Prints the truth as JSON, for each thread: {"ping": [tid, waited, pushed_aside], "pong": [...]}, how
// often it waited in a call and how often it lost its CPU while ready (getrusage).
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static long rounds;
static int there[2], back[2];

struct player {
	const char *name;
	int in, out;
	int serves;
	pid_t tid;
	long waited, pushed_aside;
};

static void *play(void *arg)
{
	struct player *p = arg;
	struct rusage before, after;
	char byte = 'x';

	pthread_setname_np(pthread_self(), p->name);
	p->tid = syscall(SYS_gettid);
	getrusage(RUSAGE_THREAD, &before);
	for (long i = 0; i < rounds; i++) {
		if (p->serves && write(p->out, &byte, 1) != 1)
			break;
		if (read(p->in, &byte, 1) != 1)
			break;
		if (!p->serves && write(p->out, &byte, 1) != 1)
			break;
	}
	getrusage(RUSAGE_THREAD, &after);
	p->waited = after.ru_nvcsw - before.ru_nvcsw;
	p->pushed_aside = after.ru_nivcsw - before.ru_nivcsw;
	return NULL;
}

int main(int argc, char **argv)
{
	struct player ping = {.name = "ping", .serves = 1}, pong = {.name = "pong"};
	pthread_t other;
	cpu_set_t one;

	rounds = argc > 1 ? atol(argv[1]) : 100000;
	CPU_ZERO(&one);
	CPU_SET(0, &one);
	sched_setaffinity(0, sizeof(one), &one); /* one CPU: they take turns */
	if (pipe(there) || pipe(back))
		return 1;
	ping.in = back[0], ping.out = there[1];
	pong.in = there[0], pong.out = back[1];
	pthread_create(&other, NULL, play, &pong);
	play(&ping);
	pthread_join(other, NULL);
	printf("{\"ping\": [%d, %ld, %ld], \"pong\": [%d, %ld, %ld]}\n", ping.tid, ping.waited,
	       ping.pushed_aside, pong.tid, pong.waited, pong.pushed_aside);
	return 0;
}
