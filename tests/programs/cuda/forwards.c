/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of a driver through a library of stubs, as XLA comes with (x86-64). Three files of one:
 *   cc -shared -fPIC -DDRIVER -o libcuda.so.1 forwards.c
 *   cc -shared -fPIC -DSTUBS -o libstubs.so forwards.c
 *   cc -o forwards forwards.c libstubs.so
 * The program makes N allocations and N frees of 4,096 bytes once it has read a line.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

int cuMemAlloc_v2(unsigned long *at, size_t size);
int cuMemFree_v2(unsigned long at);

#if defined(DRIVER)

int cuMemAlloc_v2(unsigned long *at, size_t size)
{
	*at = (unsigned long)malloc(size);
	return *at ? 0 : 2;
}

int cuMemFree_v2(unsigned long at)
{
	free((void *)at);
	return 0;
}

#elif defined(STUBS)

__attribute__((visibility("hidden"))) void *led_to[2];

/* Without sizes, and with a way out for a table that is not filled yet. */
#define STUB(name, word)                                                                           \
	__asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n"                \
		"cmpq $0, led_to+" #word "(%rip)\nje 2f\njmp *led_to+" #word "(%rip)\n"            \
		"2: pushq $" #word "\nud2\n")
STUB(cuMemAlloc_v2, 0);
STUB(cuMemFree_v2, 8);

__attribute__((constructor)) static void fill(void)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);

	led_to[0] = dlsym(driver, "cuMemAlloc_v2");
	led_to[1] = dlsym(driver, "cuMemFree_v2");
}

#else

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 1;
	unsigned long at;

	puts("ready");
	fflush(stdout);
	getchar();
	for (int i = 0; i < count; i++) {
		if (cuMemAlloc_v2(&at, 4096) || cuMemFree_v2(at))
			return 1;
	}
	return 0;
}

#endif
