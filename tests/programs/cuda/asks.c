// SPDX-License-Identifier: Apache-2.0
/* asks LIBRARY COUNT: opens the library, asks it for functions, waits for a line, and calls them. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	int (*get)(const char *, void **, int, unsigned long long, int *);
	int (*alloc)(void **, size_t), (*exported)(void **, size_t);
	int (*copy)(void *, const void *, size_t);
	long count = atol(argv[2]), bytes = 0;
	void *library = dlopen(argv[1], RTLD_NOW);
	int status;

	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	get = dlsym(library, "cuGetProcAddress_v2");
	exported = dlsym(library, "cuMemAlloc_v2");
	get("cuMemAlloc", (void **)&alloc, 13000, 0, &status);
	get("cuMemcpyHtoD", (void **)&copy, 13000, 0, &status);
	puts("ready");
	fflush(stdout);
	if (getchar() == EOF)
		return 1;
	for (long i = 0; i < count; i++) {
		void *there;

		alloc(&there, i);
		exported(&there, i);
		copy(there, &i, i);
		bytes += i;
	}
	printf("cuMemAlloc %ld %ld\ncuMemcpyHtoD %ld %ld\n", 2 * count, 2 * bytes, count, bytes);
	return 0;
}
