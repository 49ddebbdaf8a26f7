// SPDX-License-Identifier: Apache-2.0
// Stops itself in a handler of a signal, below a catch block, a qsort and a frame of variable size.
// Built with -O2 -fomit-frame-pointer -static-pie where that can be, so that few tables are needed.
#include <alloca.h>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#define KEPT __attribute__((noinline, noclone))

static volatile int sink;

extern "C" {
KEPT void handler(int)
{
	raise(SIGSTOP);
	sink = sink + 1;
}

KEPT int variable_frame(int n)
{
	volatile char *room = (volatile char *)alloca(16 + 8 * n);

	memset((void *)room, n, 16 + 8 * n);
	raise(SIGUSR1);
	return room[n] + sink;
}

KEPT int compare(const void *a, const void *b)
{
	if (!sink)
		sink = 1 + variable_frame(20 + *(const int *)a);
	return *(const int *)a - *(const int *)b;
}

KEPT int sorter(int n)
{
	int values[] = {3, n, 2};

	qsort(values, 3, sizeof(int), compare);
	return values[0];
}

KEPT int catcher(int n)
{
	try {
		if (n)
			throw std::runtime_error("thrown");
	} catch (const std::exception &) {
		return sorter(n) + 1;
	}
	return 0;
}

KEPT int recurse(int depth)
{
	int below = depth ? recurse(depth - 1) : catcher(1);

	sink = sink + below;
	return below + 1;
}
}

int main()
{
	signal(SIGUSR1, handler);
	return recurse(12);
}
