// SPDX-License-Identifier: Apache-2.0
/* Prints "ready", then starts children without end that each map, touch and unmap memory in several ways. */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void use(size_t size, int rights, int kind)
{
	volatile char *memory = mmap(0, size, rights, kind | MAP_ANONYMOUS, -1, 0);

	if (rights) {
		(void)memory[0];
		memory[4096] = 1;
	}
	munmap((void *)memory, size);
}

int main(void)
{
	puts("ready");
	fflush(stdout);
	for (;;) {
		pid_t child = vfork(); /* in the same memory, which is faster */

		if (!child) {
			use(8192, PROT_READ | PROT_WRITE, MAP_PRIVATE);
			use(8192, PROT_READ | PROT_WRITE, MAP_SHARED);
			use(8192, PROT_NONE, MAP_PRIVATE);
			_exit(0);
		}
		waitpid(child, 0, 0);
	}
}
