// SPDX-License-Identifier: Apache-2.0
/* Keeps the lock of its memory map: threads that change the protection of a large area, which
 * shows the page of zeroes alone and so costs next to no memory. Who wants to read the map waits
 * for all of them.  usage: map_lock GIBIBYTES THREADS SECONDS, and it ends after SECONDS. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

static char *area;
static size_t size;

static void *keep_locking(void *unused)
{
	for (;;) {
		mprotect(area, size, PROT_NONE);
		mprotect(area, size, PROT_READ);
	}
	return unused;
}

int main(int argc, char **argv)
{
	pthread_attr_t attributes;
	pthread_t thread;
	long threads;

	if (argc != 4)
		return 2;
	alarm((unsigned int)atoi(argv[3]));
	size = (size_t)atol(argv[1]) << 30;
	threads = atol(argv[2]);
	area = mmap(NULL, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (area == MAP_FAILED)
		return 1;
	madvise(area, size, MADV_NOHUGEPAGE);
	madvise(area, size, MADV_POPULATE_READ);
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 65536);
	puts("ready"); /* before the threads: those wait for the lock, too */
	fflush(stdout);
	while (threads-- > 0)
		pthread_create(&thread, &attributes, keep_locking, NULL);
	for (;;)
		pause();
}
