// SPDX-License-Identifier: Apache-2.0
// Contexts come and go while their threads launch; then the process exits in the middle of it.
//
//     contexts SECONDS destroy | primary | reset | exit
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void *stub_function(const char *name, uint64_t ns);
unsigned long stub_launches(void *f);
int cuInit(unsigned);
int cuCtxCreate_v2(void **, unsigned, int);
int cuCtxDestroy_v2(void *);
int cuCtxSetCurrent(void *);
int cuDevicePrimaryCtxRetain(void **, int);
int cuDevicePrimaryCtxRelease_v2(int);
int cuDevicePrimaryCtxReset_v2(int);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		   void *, void **, void **);

#define THREADS 3
static void *kernel;
static const char *way;
static double end_s;
static atomic_int lives;

static double now_s(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static void launches(unsigned count)
{
	struct timespec t = {0, 50000};
	for (unsigned i = 0; i < count; i++) {
		if (cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL))
			abort();
		nanosleep(&t, NULL);
	}
}

static void *come_and_go(void *number)
{
	unsigned seed = (unsigned)(uintptr_t)number;
	while (now_s() < end_s) {
		void *context;
		cuCtxCreate_v2(&context, 0, 0);
		launches(50 + rand_r(&seed) % 600); // long enough for some to be timed
		cuCtxDestroy_v2(context);
		lives++;
	}
	return NULL;
}

static void primary_comes_and_goes(int is_reset)
{
	unsigned seed = 1;
	cuDevicePrimaryCtxRelease_v2(0); // the one that the stub begins with
	while (now_s() < end_s) {
		void *context;
		cuDevicePrimaryCtxRetain(&context, 0);
		cuCtxSetCurrent(context);
		launches(50 + rand_r(&seed) % 600);
		if (is_reset) {
			cuDevicePrimaryCtxReset_v2(0);
		} else {
			cuDevicePrimaryCtxRetain(&context, 0);
			cuDevicePrimaryCtxRelease_v2(0); // one user is left
			launches(20);
			cuDevicePrimaryCtxRelease_v2(0);
		}
		lives++;
	}
}

static void *launch_for_ever(void *unused)
{
	void *context;
	(void)unused;
	cuCtxCreate_v2(&context, 0, 0);
	for (;;)
		cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS];
	end_s = now_s() + atof(argv[1]);
	way = argv[argc - 1];
	cuInit(0);
	kernel = stub_function("kernel", 30000);
	if (!strcmp(way, "destroy")) {
		for (uintptr_t i = 0; i < THREADS; i++)
			pthread_create(&threads[i], NULL, come_and_go, (void *)(i + 1));
		for (int i = 0; i < THREADS; i++)
			pthread_join(threads[i], NULL);
	} else if (!strcmp(way, "exit")) {
		pthread_create(&threads[0], NULL, launch_for_ever, NULL);
		launches(5000);
	} else {
		primary_comes_and_goes(!strcmp(way, "reset"));
	}
	printf("kernel %lu %d\n", stub_launches(kernel), lives);
	fflush(stdout);
	exit(0);
}
