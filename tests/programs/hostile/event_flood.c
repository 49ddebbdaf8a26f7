// SPDX-License-Identifier: Apache-2.0
/*
 * A flood of what the kernel reports of processes.
 *
 * event_flood map|name|fork: prints "ready", then maps memory to execute it, names itself or starts children
 * without end.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define PLACES 100
#define APART 8192
#define SIZES 64

static void map(char *memory, unsigned long n)
{
	char *place = memory + n % PLACES * APART;
	size_t size = 4096 * (1 + n / PLACES % SIZES); /* repeats would be merged */

	mprotect(place, size, PROT_READ | PROT_EXEC);
	mprotect(place, size, PROT_READ);
}

static void name(unsigned long n)
{
	char text[16];

	snprintf(text, sizeof(text), "n%lu", n);
	prctl(PR_SET_NAME, text);
}

static void start(void)
{
	pid_t child = vfork(); /* the cheapest: no memory is copied */

	if (!child)
		_exit(0);
	waitpid(child, NULL, 0);
}

int main(int argc, char **argv)
{
	const char *way = argc > 1 ? argv[1] : "map";
	size_t bytes = PLACES * APART + SIZES * 4096;
	char *memory =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return 1;
	puts("ready");
	fflush(stdout);
	for (unsigned long n = 0;; n++)
		if (!strcmp(way, "map"))
			map(memory, n);
		else if (!strcmp(way, "name"))
			name(n);
		else
			start();
}
