// SPDX-License-Identifier: Apache-2.0
// Launches on a (stub) device, and traces itself by (stub) CUPTI as torch.profiler does: a while
// without, a while with, three times or as often as its argument states. Prints what it launched
// while it traced, and what the trace saw.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CONCURRENT_KERNEL 10
#define RUNTIME 5

void *stub_function(const char *name, uint64_t ns);
unsigned long stub_traced(void);
int cuInit(unsigned);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		   void *, void **, void **);
int cuptiActivityEnable(int);
int cuptiActivityDisable(int);

static unsigned long launch_for(void *f, double seconds)
{
	struct timespec now, t = {0, 300000};
	unsigned long n = 0;
	clock_gettime(CLOCK_MONOTONIC, &now);
	double end = now.tv_sec + now.tv_nsec / 1e9 + seconds;
	while (now.tv_sec + now.tv_nsec / 1e9 < end) {
		if (cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL))
			abort();
		n++;
		nanosleep(&t, NULL);
		clock_gettime(CLOCK_MONOTONIC, &now);
	}
	return n;
}

int main(int argc, char **argv)
{
	int times = argc > 1 ? atoi(argv[1]) : 3;
	unsigned long own = 0, refused;
	cuInit(0);
	void *f = stub_function("_Z7shorterPf", 20000);
	for (int i = 0; i < times; i++) {
		launch_for(f, 0.8);
		cuptiActivityEnable(RUNTIME);
		refused = (unsigned long)cuptiActivityEnable(99);
		if (cuptiActivityEnable(CONCURRENT_KERNEL) || !refused)
			abort();
		own += launch_for(f, 0.5);
		cuptiActivityDisable(CONCURRENT_KERNEL);
		cuptiActivityDisable(RUNTIME);
	}
	launch_for(f, 0.8);
	printf("%lu %lu\n", own, stub_traced());
	return 0;
}
