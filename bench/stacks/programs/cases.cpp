// SPDX-License-Identifier: Apache-2.0
// One hard thing to unwind each, for ever. Built with -O2 -fomit-frame-pointer.
//   cases exceptions | qsort | signals | recursion
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <stdexcept>

#define KEPT __attribute__((noinline, noclone))

static volatile long sink;

KEPT static long spin(long n)
{
	long s = 0;
	for (long i = 0; i < n; i++)
		s += i ^ (s << 1), sink = s;
	return s;
}

KEPT static long thrower(int depth)
{
	if (depth)
		return thrower(depth - 1) + spin(20);
	throw std::runtime_error("thrown");
}

static void exceptions()
{
	try {
		thrower(10);
	} catch (const std::exception &) {
		spin(500);
	}
}

KEPT static int compare(const void *a, const void *b)
{
	spin(20);
	return *(const int *)a - *(const int *)b;
}

static void sort()
{
	int values[2000];
	for (int i = 0; i < 2000; i++)
		values[i] = i * 7919 % 1000;
	qsort(values, 2000, sizeof(int), compare);
	sink = values[3];
}

static void on_signal(int)
{
	spin(2000);
	sink = 1;
}

static void signals()
{
	raise(SIGUSR1);
	sink = 2;
}

KEPT static long recurse(int depth)
{
	long below = depth ? recurse(depth - 1) : spin(20000);
	sink = below;
	return below + 1;
}

static void recursion()
{
	recurse(500);
}

static void (*chosen)();

static void *loop(void *)
{
	for (;;)
		chosen();
}

int main(int, char **arguments)
{
	pthread_t thread;
	const char *what = arguments[1];

	chosen = !strcmp(what, "exceptions") ? exceptions : !strcmp(what, "qsort") ? sort :
		 !strcmp(what, "signals") ? signals : recursion;
	signal(SIGUSR1, on_signal);
	pthread_create(&thread, nullptr, loop, nullptr);
	loop(nullptr);
}
