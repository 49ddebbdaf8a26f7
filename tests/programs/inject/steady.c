// SPDX-License-Identifier: Apache-2.0
// steady [NS]: launches on a (stub) device all the time, NS (300,000) apart, with (stub) CUPTI loaded, until its input ends. For each line it
// prints one: `state` what CUPTI has switched on, launches so far, and buffers that CUPTI handed over; `fork` how
// a child ended that launched some, too.
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define OF_CHILD 100

void *stub_function(const char *name, uint64_t ns);
unsigned stub_kinds(void);
unsigned long stub_buffers(void);
int cuInit(unsigned);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		   void *, void **, void **);

static _Atomic unsigned long launches;
static _Atomic int over;
static long pause_ns = 300000;

static void launch(void *f)
{
	struct timespec t = {0, pause_ns};
	if (cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL))
		abort();
	atomic_fetch_add(&launches, 1);
	nanosleep(&t, NULL);
}

static void *launch_on(void *f)
{
	while (!atomic_load(&over))
		launch(f);
	return NULL;
}

static int child_ended(void *f)
{
	int status = -1;
	pid_t child = fork();
	if (!child) {
		for (int i = 0; i < OF_CHILD; i++)
			launch(f);
		_exit(7);
	}
	if (child < 0 || waitpid(child, &status, 0) != child)
		return -1;
	return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int main(int argc, char **argv)
{
	char line[64];
	pthread_t thread;
	if (argc > 1)
		pause_ns = atol(argv[1]);
	cuInit(0);
	void *f = stub_function("_Z7shorterPf", 20000);
	if (pthread_create(&thread, NULL, launch_on, f))
		return 1;
	while (fgets(line, sizeof line, stdin)) {
		if (!strcmp(line, "fork\n"))
			printf("%d\n", child_ended(f));
		else
			printf("%u %lu %lu\n", stub_kinds(), atomic_load(&launches),
			       stub_buffers());
		fflush(stdout);
	}
	atomic_store(&over, 1);
	pthread_join(thread, NULL);
	return 0;
}
