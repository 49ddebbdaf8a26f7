// SPDX-License-Identifier: Apache-2.0
/* Two threads at work for some seconds: linked with musl, nothing describes where they begin. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

static volatile unsigned long sum;

__attribute__((noinline)) static void work(double seconds)
{
	struct timespec begin, now;

	clock_gettime(CLOCK_MONOTONIC, &begin);
	do {
		for (int i = 0; i < 100000; i++)
			sum += i;
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec - begin.tv_sec + (now.tv_nsec - begin.tv_nsec) / 1e9 < seconds);
}

static void *in_thread(void *seconds)
{
	work(atof(seconds));
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t thread;

	if (argc != 2 || pthread_create(&thread, NULL, in_thread, argv[1]))
		return 1;
	work(atof(argv[1]));
	return pthread_join(thread, NULL);
}
