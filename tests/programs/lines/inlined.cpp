// SPDX-License-Identifier: Apache-2.0
// Known inlines, each marked by what the tests look for: inlined SECONDS. Built with -g -O2.
#include <cstdlib>
#include <ctime>

static volatile long sink;

static double now()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

__attribute__((always_inline)) static inline void innermost(long n)
{
	for (long i = 0; i < n; i++)
		sink = sink + (i ^ (i << 1)); // line: innermost
}

namespace shapes
{
template <typename T> struct Box {
	__attribute__((always_inline)) inline void middle(T n)
	{
		innermost(n); // line: middle
	}
};
}

__attribute__((noinline)) long outer(long n)
{
	shapes::Box<long> box;
	box.middle(n); // line: outer
	return sink;
}

int main(int, char **arguments)
{
	double until = now() + atof(arguments[1]);
	while (now() < until)
		sink = outer(100000) + 1; // line: main
}
