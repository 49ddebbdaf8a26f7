// SPDX-License-Identifier: Apache-2.0
// COUNT threads one after the other, each of which sleeps once. Prints how often they left their CPU
// as JSON: {"threads": n, "switches": n, "first": n}, of all and of the thread that starts them.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

static void *nap(void *arg)
{
	const struct timespec moment = {0, 1000};

	nanosleep(&moment, NULL);
	return NULL;
}

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 20000;
	struct rusage before, after, own_before, own;
	pthread_t thread;

	getrusage(RUSAGE_SELF, &before);
	getrusage(RUSAGE_THREAD, &own_before);
	for (long i = 0; i < count; i++)
		if (pthread_create(&thread, NULL, nap, NULL) || pthread_join(thread, NULL))
			return 1;
	getrusage(RUSAGE_THREAD, &own);
	getrusage(RUSAGE_SELF, &after);
	printf("{\"threads\": %ld, \"switches\": %ld, \"first\": %ld}\n", count,
	       after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw,
	       own.ru_nvcsw + own.ru_nivcsw - own_before.ru_nvcsw - own_before.ru_nivcsw);
	return 0;
}
