// SPDX-License-Identifier: Apache-2.0
/*
 * Works in a function whose name WORK sets, then executes another program in its place.
 *
 *     executes MS [PROGRAM ARGUMENT...]
 *
 * Built with -static -no-pie and another name, it is a program with other functions at the same addresses.
 * It uses the CPU for MS milliseconds, and sleeps after each ten of them.
 */
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static long used_ms(void)
{
	struct timespec used;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
	return used.tv_sec * 1000 + used.tv_nsec / 1000000;
}

__attribute__((noinline)) void WORK(long ms)
{
	const struct timespec pause = {.tv_nsec = 5000000};

	for (long turn = 0; turn < ms / 10; turn++) {
		for (long until = used_ms() + 10; used_ms() < until;)
			for (volatile int i = 0; i < 100000;)
				i++;
		nanosleep(&pause, NULL);
	}
}

int main(int argc, char **argv)
{
	if (argc < 2)
		return 2;
	WORK(atol(argv[1]));
	if (argc > 2) {
		execv(argv[2], argv + 2);
		return 3;
	}
	return 0;
}
