// SPDX-License-Identifier: Apache-2.0
// A hostile program: it waits for the file that an attach makes in it and puts another one under
// its number, before the library is written.
//
//   swap VICTIM          a descriptor of VICTIM that needs no right to it (O_PATH)
//   swap --own NAME      a memfd of the program's own, of this name, mapped where it can be written
//
// Prints "ready"; ends when its standard input closes, with what it swapped.
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LOWEST = 3, COUNT = 4, PREPARED = 100 };
static atomic_int over, swapped;
static void *volatile written;

static void *swaps(void *arg)
{
	bool ours[COUNT] = {false};
	while (!over)
		for (int k = 0; k < COUNT; k++) {
			if (fcntl(LOWEST + k, F_GETFD) < 0)
				ours[k] = false;
			else if (!ours[k] && dup2(PREPARED, LOWEST + k) >= 0)
				ours[k] = ++swapped;
		}
	return arg;
}

static void *sleeps(void *arg)
{
	while (!over)
		usleep(20000);
	return arg;
}

int main(int argc, char **argv)
{
	int own = argc > 2 && !strcmp(argv[1], "--own");
	int fd = own ? memfd_create(argv[2], MFD_ALLOW_SEALING) : open(argv[argc - 1], O_PATH);
	if (fd < 0 || dup2(fd, PREPARED) < 0)
		return 1;
	if (own && ftruncate(fd, 4096) == 0)
		written = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (own && ftruncate(fd, 0)) // looks empty, and can be written through the mapping
		return 1;
	close(fd);
	for (int low = LOWEST; low < LOWEST + COUNT; low++)
		close(low); // whatever was inherited
	pthread_t thread, sleeper;
	if (pthread_create(&thread, NULL, swaps, NULL) ||
	    pthread_create(&sleeper, NULL, sleeps, NULL))
		return 1;
	printf("ready\n");
	fflush(stdout);
	for (char c;;) {
		struct pollfd p = {0, POLLIN, 0};
		if (poll(&p, 1, -1) > 0 && read(0, &c, 1) == 0)
			break;
	}
	over = 1;
	pthread_join(thread, NULL);
	pthread_join(sleeper, NULL);
	printf("%d\n", swapped);
	return 0;
}
