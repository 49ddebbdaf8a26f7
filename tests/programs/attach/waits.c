// SPDX-License-Identifier: Apache-2.0
// A server whose threads wait, each in another system call, most of which answer EINTR to a mere stop.
//
//   waits [--small] [--filter | --deny] [--fed TICKS] MODE…
//
// Without --fed nothing arrives: every call ends by its timeout, is made again, and each EINTR is
// counted. With --fed a feeder sends the same sequence of values to all of them, one a millisecond,
// until TICKS were sent or (TICKS 0) standard input closes; what arrives goes into a checksum, which is
// that of every run with as many ticks.
// --small: stacks too small for a thread to be borrowed. --filter: under a seccomp filter that forbids
// ptrace; --deny: that forbids memfd_create.
// Prints "ready"; at the end one line of JSON.
//
// What the threads wait in: waits_calls.c.
#define _GNU_SOURCE
#include "waits.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_int over;
static long ticks = -1; // as many values are sent, 0: until the end; -1: none
atomic_long sent = -1;

static struct mode *chosen[MODES];
static unsigned count;

static void *waits(void *arg)
{
	struct mode *m = arg;
	for (;;) {
		if ((ticks < 0 || !m->feed) && over)
			return NULL;
		errno = 0;
		long value = m->wait(m);
		if (value == LAST)
			return NULL;
		if (value >= 0) {
			m->sum = (m->sum ^ (uint64_t)(value + 1)) * 0x100000001b3;
			m->odd += value != m->rounds;
			m->rounds++;
		} else if (errno == EINTR) {
			m->eintr++;
		} else if (errno != EAGAIN && errno != ETIME && errno != ETIMEDOUT) {
			m->odd++;
		}
	}
}

static void *feeds(void *arg)
{
	struct timespec ms = {0, 1000000};
	long tick = 0;
	for (; ticks ? tick < ticks : !over; tick++) {
		for (unsigned i = 0; i < count; i++)
			if (chosen[i]->feed)
				chosen[i]->feed(chosen[i], tick);
		nanosleep(&ms, NULL);
	}
	sent = tick;
	for (unsigned i = 0; i < count; i++)
		if (chosen[i]->feed)
			chosen[i]->feed(chosen[i], LAST);
	over = 1;
	return arg;
}

static void *ends(void *arg)
{
	for (char c; read(0, &c, 1) != 0;)
		;
	over = 1;
	return arg;
}

static void filter(int number)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)number, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {4, code};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		die("seccomp");
}

static pthread_t start(void *(*body)(void *), void *arg, size_t stack_bytes)
{
	pthread_t thread;
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, stack_bytes);
	if (pthread_create(&thread, &attributes, body, arg))
		die("pthread_create");
	return thread;
}

int main(int argc, char **argv)
{
	size_t stack_bytes = 1 << 20;
	sigset_t all;
	sigemptyset(&all);
	sigaddset(&all, SIGRTMIN);
	sigaddset(&all, SIGRTMIN + 1);
	sigprocmask(SIG_BLOCK, &all, NULL);
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--small"))
			stack_bytes = 64 << 10;
		else if (!strcmp(argv[i], "--filter"))
			filter(SYS_ptrace);
		else if (!strcmp(argv[i], "--deny"))
			filter(SYS_memfd_create);
		else if (!strcmp(argv[i], "--fed"))
			ticks = atol(argv[++i]);
		else
			for (struct mode *m = modes; m < modes + MODES; m++)
				if (!strcmp(argv[i], m->name))
					chosen[count++] = m;
	}
	pthread_t thread[MODES];
	for (unsigned i = 0; i < count; i++)
		if (chosen[i]->begin(chosen[i]))
			die(chosen[i]->name);
	for (unsigned i = 0; i < count; i++)
		thread[i] = start(waits, chosen[i], stack_bytes);
	start(ends, NULL, stack_bytes);
	printf("ready\n");
	fflush(stdout);
	if (ticks >= 0)
		pthread_join(start(feeds, NULL, stack_bytes), NULL);
	for (unsigned i = 0; i < count; i++)
		pthread_join(thread[i], NULL);
	printf("{\"ticks\":%ld,\"modes\":{", (long)sent);
	for (unsigned i = 0; i < count; i++) {
		struct mode *m = chosen[i];
		if (!strcmp(m->name, "semop"))
			semctl(m->fd[0], 0, IPC_RMID);
		if (!strcmp(m->name, "msgrcv"))
			msgctl(m->fd[0], IPC_RMID, NULL);
		printf("%s\"%s\":{\"rounds\":%ld,\"sum\":\"%016lx\",\"eintr\":%ld,\"odd\":%ld}",
		       i ? "," : "", m->name, m->rounds, m->sum, m->eintr, m->odd);
	}
	printf("}}\n");
	return 0;
}
