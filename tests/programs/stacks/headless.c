// SPDX-License-Identifier: Apache-2.0
/* A process whose first thread ends at once while two others burn CPU in separate functions:
 * usage: headless SECONDS [SECONDS_BEFORE_THAT] */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static volatile unsigned long sum;
static double seconds;

static int time_is_up(const struct timespec *began)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec - began->tv_sec + (now.tv_nsec - began->tv_nsec) / 1e9 > seconds;
}

__attribute__((noinline)) static void spin(unsigned long step)
{
	for (unsigned long i = 0; i < 300000; i++)
		sum += i * step;
	__asm__ volatile("" ::: "memory");
}

__attribute__((noinline)) static void first_work(const struct timespec *began)
{
	while (!time_is_up(began))
		spin(1);
	__asm__ volatile("" ::: "memory");
}

__attribute__((noinline)) static void second_work(const struct timespec *began)
{
	while (!time_is_up(began))
		spin(2);
	__asm__ volatile("" ::: "memory");
}

static void *first_entry(void *began)
{
	first_work(began);
	return NULL;
}

static void *second_entry(void *began)
{
	second_work(began);
	return NULL;
}

int main(int argc, char **argv)
{
	static struct timespec began;
	pthread_t thread;

	seconds = argc > 1 ? atof(argv[1]) : 5;
	clock_gettime(CLOCK_MONOTONIC, &began);
	pthread_create(&thread, NULL, first_entry, &began);
	pthread_create(&thread, NULL, second_entry, &began);
	if (argc > 2)
		usleep((useconds_t)(atof(argv[2]) * 1e6));
	pthread_exit(NULL);
}
