// SPDX-License-Identifier: Apache-2.0
// Contexts come and go while their threads launch; then the process exits in the middle of it.
//
//     contexts SECONDS destroy | primary | reset | exit
//
// With -DREAL_DRIVER it is for a GPU.
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef REAL_DRIVER
int cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *);
#else
void *stub_function(const char *name, uint64_t ns);
#endif
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
static const char *way;
static double end_s;
static atomic_int lives;
static atomic_ulong launched;

static double now_s(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

// A kernel of the current context.
static void *kernel_here(void)
{
#ifdef REAL_DRIVER
	static const char code[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
				   ".visible .entry kernel()\n{\n"
				   ".reg .b64 %from, %now; .reg .pred %p;\n"
				   "mov.u64 %from, %globaltimer;\n"
				   "AGAIN:\n"
				   "mov.u64 %now, %globaltimer;\n"
				   "sub.u64 %now, %now, %from;\n"
				   "setp.lt.u64 %p, %now, 30000;\n"
				   "@%p bra AGAIN;\n"
				   "ret;\n}\n";
	void *module, *function;
	if (cuModuleLoadData(&module, code) || cuModuleGetFunction(&function, module, "kernel"))
		abort();
	return function;
#else
	static void *only;
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	pthread_mutex_lock(&lock);
	if (!only)
		only = stub_function("kernel", 30000);
	pthread_mutex_unlock(&lock);
	return only;
#endif
}

static void launches(unsigned count)
{
	void *kernel = kernel_here();
	struct timespec t = {0, 50000};
	for (unsigned i = 0; i < count; i++) {
		if (cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL))
			abort();
		launched++;
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
#ifndef REAL_DRIVER
	cuDevicePrimaryCtxRelease_v2(0); // the one that the stub begins with
#endif
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
	void *kernel = kernel_here();
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
	if (!strcmp(way, "destroy")) {
		for (uintptr_t i = 0; i < THREADS; i++)
			pthread_create(&threads[i], NULL, come_and_go, (void *)(i + 1));
		for (int i = 0; i < THREADS; i++)
			pthread_join(threads[i], NULL);
	} else if (!strcmp(way, "exit")) {
		void *context;
		pthread_create(&threads[0], NULL, launch_for_ever, NULL);
		cuCtxCreate_v2(&context, 0, 0);
		launches(5000);
	} else {
		primary_comes_and_goes(!strcmp(way, "reset"));
	}
	printf("kernel %lu %d\n", launched, lives);
	fflush(stdout);
	exit(0);
}
