// SPDX-License-Identifier: Apache-2.0
// Call trees that are known: whatever burns time is called spin, and who called it is fixed. Built
// with -O2 -fomit-frame-pointer.
//   tree SECONDS DEPTH
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <pthread.h>
#include <stdexcept>

#define KEPT __attribute__((noinline, noclone))

static volatile long sink;

static double now()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

extern "C" {
KEPT long spin(long n)
{
	long s = 0;
	for (long i = 0; i < n; i++)
		s += i ^ (s << 1), sink = s;
	return s;
}

KEPT long recurse(int depth)
{
	long below = depth ? recurse(depth - 1) : spin(20000);
	sink = below;
	return below + 1;
}

KEPT int thrower(int n)
{
	spin(3000);
	if (n)
		throw std::runtime_error("thrown");
	return 1;
}

KEPT int catcher(int n)
{
	try {
		return thrower(n) + 1;
	} catch (const std::exception &) {
		return (int)spin(3000);
	}
}

KEPT int compare(const void *a, const void *b)
{
	spin(50);
	return *(const int *)a - *(const int *)b;
}

KEPT void sorter()
{
	int values[200];
	for (int i = 0; i < 200; i++)
		values[i] = i * 7919 % 1000;
	qsort(values, 200, sizeof(int), compare);
	sink = values[3];
}

KEPT void handler_work()
{
	spin(20000);
	sink = 1;
}

void on_signal(int)
{
	handler_work();
	sink = 2;
}

KEPT void signaller()
{
	raise(SIGUSR1);
	sink = 3;
}

KEPT long variable_frame(int n)
{
	volatile char *room = (char *)__builtin_alloca(n);
	room[n - 1] = 1;
	return spin(5000) + room[n - 1];
}

KEPT long realigned(int n)
{
	alignas(64) volatile char room[64];
	room[n & 63] = 1;
	return spin(5000) + room[n & 63];
}

void *thread_entry(void *until)
{
	while (now() < *(double *)until) {
		recurse(20);
		variable_frame(1000);
	}
	return nullptr;
}
}

int main(int, char **arguments)
{
	double until = now() + atof(arguments[1]);
	int depth = atoi(arguments[2]);
	pthread_t thread;

	signal(SIGUSR1, on_signal);
	pthread_create(&thread, nullptr, thread_entry, &until);
	while (now() < until) {
		recurse(depth);
		catcher(1);
		sorter();
		signaller();
		variable_frame(5000);
		realigned(depth);
	}
	pthread_join(thread, nullptr);
}
