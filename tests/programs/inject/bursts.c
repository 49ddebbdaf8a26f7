// SPDX-License-Identifier: Apache-2.0
// Launches in bursts on a (stub) device that is idle before each: one of `first` (as many as FIRST has in the environment),
// and then some of `rest`. Prints how many of each.
//
//     bursts SECONDS REST
//
// Before it begins it waits for a byte on standard input, where there is one more argument.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

void *stub_function(const char *name, uint64_t ns);
unsigned long stub_launches(void *f);
int cuInit(unsigned);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		   void *, void **, void **);
int cuStreamCreate(void **, unsigned);
int cuStreamSynchronize(void *);

static void launch(void *f, void *stream)
{
	if (cuLaunchKernel(f, 1, 1, 1, 64, 1, 1, 0, stream, NULL, NULL))
		abort();
}

int main(int argc, char **argv)
{
	char byte;
	if (argc < 3 || (argc > 3 && read(0, &byte, 1) != 1))
		return 2;
	int rest = atoi(argv[2]), firsts = getenv("FIRST") ? atoi(getenv("FIRST")) : 1;
	void *stream;
	cuInit(0);
	cuStreamCreate(&stream, 0);
	void *first = stub_function("first", 300000), *others = stub_function("rest", 300000);
	time_t end = time(NULL) + atoi(argv[1]);
	while (time(NULL) < end) {
		for (int k = 0; k < firsts; k++)
			launch(first, stream);
		for (int k = 0; k < rest; k++)
			launch(others, stream);
		cuStreamSynchronize(stream);
		usleep(1000);
	}
	printf("%lu %lu\n", stub_launches(first), stub_launches(others));
	return 0;
}
