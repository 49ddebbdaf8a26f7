// SPDX-License-Identifier: Apache-2.0
// A program that launches on a (stub) device: threads with a stream each, captures in between,
// forks, a handler of signals. Prints what it did: name, launches, ns each.
//
//     launches SECONDS [capture] [fork] [exec] [legacy] [copies] [deep]
//
// deep: faster than the device works, so that its queue grows.
//
// A forked child launches 300 times, then stays until standard input has a byte for it or ends; five
// seconds at most.
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void *stub_function(const char *name, uint64_t ns);
unsigned long stub_launches(void *f);
int cuInit(unsigned);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		   void *, void **, void **);
int cuGraphLaunch(void *, void *);
int cuStreamCreate(void **, unsigned);
int cuMemcpyHtoDAsync_v2(uint64_t, const void *, size_t, void *);
int cuMemcpyDtoHAsync_v2(void *, uint64_t, size_t, void *);
int cuMemcpyAsync(uint64_t, uint64_t, size_t, void *);
int cuMemsetD32Async(uint64_t, unsigned, size_t, void *);
int cuStreamSynchronize(void *);
int cuStreamBeginCapture_v2(void *, int);
int cuStreamEndCapture(void *, void **);

#define THREADS 3
static void *shorter, *longer, *graph;
static atomic_int over;
static atomic_int with_capture;
static int with_legacy;
static atomic_ulong ticks;

static void on_alarm(int signal)
{
	(void)signal;
	ticks++;
}

static void nap(long ns)
{
	struct timespec t = {0, ns};
	nanosleep(&t, NULL);
}

static void launch(void *f, void *stream)
{
	if (cuLaunchKernel(f, 7, 2, 1, 128, 1, 1, 0, stream, NULL, NULL))
		abort();
}

static atomic_ulong copied, moved_on, set, waited;
static int with_copies, is_deep;

static void copy(void *stream)
{
	const uint64_t on_device = 1ull << 48;
	if (cuMemcpyHtoDAsync_v2(on_device, &copied, 400000, stream) ||
	    cuMemcpyDtoHAsync_v2(&copied, on_device, 350000, stream) ||
	    cuMemcpyAsync(on_device, on_device + 4096, 200000, stream) ||
	    cuMemsetD32Async(on_device, 0, 75000, stream) || cuStreamSynchronize(stream))
		abort();
	copied++;
	moved_on++;
	set++;
	waited++;
}

static void *work(void *number)
{
	void *stream = NULL;
	if (!with_legacy && cuStreamCreate(&stream, 1))
		abort();
	for (unsigned long n = 0; !over; n++) {
		launch(shorter, stream);
		launch(shorter, stream);
		launch(longer, stream);
		cuGraphLaunch(graph, stream);
		if (with_copies)
			copy(stream);
		if (!is_deep)
			nap(200000);
		if (with_capture && number == NULL && n % 20 == 0) {
			void *captured, *side;
			static void *kept;
			if (!kept && cuStreamCreate(&kept, 1))
				abort();
			side = kept;
			if (cuStreamBeginCapture_v2(side, 0))
				abort();
			for (int k = 0; k < 5; k++)
				cuLaunchKernel(shorter, 1, 1, 1, 1, 1, 1, 0, side, NULL, NULL);
			if (cuStreamEndCapture(side, &captured))
				abort();
			with_capture++;
			if (with_capture > 40)
				with_capture = 0;
		}
	}
	return NULL;
}

static void children(int do_exec)
{
	for (int i = 0; i < 5; i++) {
		pid_t child = fork();
		if (!child) {
			if (do_exec)
				execlp("true", "true", NULL);
			for (int k = 0; k < 300; k++)
				launch(shorter, NULL), nap(1000000);
			struct pollfd input = {.events = POLLIN};
			char byte;
			_exit(poll(&input, 1, 5000) > 0 && read(0, &byte, 1) < 0);
		}
		int status;
		waitpid(child, &status, 0);
		if (status)
			abort();
	}
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS];
	double seconds = atof(argv[1]);
	int forks = 0, do_exec = 0;
	for (int i = 2; i < argc; i++) {
		with_capture |= !strcmp(argv[i], "capture");
		with_copies |= !strcmp(argv[i], "copies");
		with_legacy |= !strcmp(argv[i], "legacy");
		is_deep |= !strcmp(argv[i], "deep");
		forks |= !strcmp(argv[i], "fork");
		do_exec |= !strcmp(argv[i], "exec");
	}
	cuInit(0);
	shorter = stub_function("_Z7shorterPf", 20000);
	longer = stub_function("longer", 60000);
	graph = stub_function("graph", 100000);
	struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
	sigaction(SIGALRM, &action, NULL);
	struct itimerval every = {{0, 5000}, {0, 5000}};
	setitimer(ITIMER_REAL, &every, NULL);
	for (long i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, work, (void *)i);
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	double end = now.tv_sec + now.tv_nsec / 1e9 + seconds;
	do {
		if (forks || do_exec)
			children(do_exec);
		nap(10000000);
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec + now.tv_nsec / 1e9 < end);
	over = 1;
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	nap(300000000);
	printf("shorter %lu 20000\nlonger %lu 60000\ngraph %lu 100000\n", stub_launches(shorter),
	       stub_launches(longer), stub_launches(graph));
	if (with_copies)
		printf("h2d %lu 400000\nd2h %lu 350000\nd2d %lu 200000\nset %lu 300000\nwaits %lu "
		       "0\n",
		       copied, copied, moved_on, set, waited);
	return ticks ? 0 : 1;
}
