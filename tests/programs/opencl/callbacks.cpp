// SPDX-License-Identifier: Apache-2.0
// Functions of the caller that a device call runs, and that do not return to it. The program brings its own
// OpenCL entry point; built with -DBELOW it is a library with the entry point that a loader calls.
//
// callbacks throw|exit|nest COUNT [LIBRARY]: prints "ready", waits for a line, makes the calls, prints how many
// exceptions were caught or guards released.
#include <dlfcn.h>
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#define ENTRY_POINT extern "C" __attribute__((noipa, visibility("default")))
using Notify = void (*)(void *, void *);
using Build = int (*)(void *, unsigned, void *, const char *, Notify, void *);

#ifdef BELOW
static volatile int work;
ENTRY_POINT int clBuildProgram(void *, unsigned, void *, const char *, Notify, void *)
{
	work = work + 1;
	return 0;
}
#else
static Build below;

ENTRY_POINT int clBuildProgram(void *program, unsigned n, void *devices, const char *options,
			       Notify notify, void *data)
{
	int status = below ? below(program, n, devices, options, nullptr, nullptr) : 0;

	if (notify)
		notify(program, data);
	return status;
}

static long released;

struct Guard {
	~Guard()
	{
		released++;
	}
};

static void throws(void *, void *)
{
	throw std::runtime_error("from the callback");
}

static void exits(void *, void *)
{
	pthread_exit(nullptr);
}

static void *builds(void *)
{
	Guard guard;

	clBuildProgram(nullptr, 0, nullptr, "", exits, nullptr);
	return nullptr;
}

int main(int argc, char **argv)
{
	char which = argc > 1 ? argv[1][0] : 't';
	long count = argc > 2 ? std::atol(argv[2]) : 1, caught = 0;

	if (argc > 3)
		below = reinterpret_cast<Build>(dlsym(dlopen(argv[3], RTLD_NOW), "clBuildProgram"));
	std::puts("ready");
	std::fflush(stdout);
	if (std::getchar() == EOF)
		return 1;
	for (long i = 0; i < count; i++) {
		if (which == 'e') {
			pthread_t thread;

			pthread_create(&thread, nullptr, builds, nullptr);
			pthread_join(thread, nullptr);
			continue;
		}
		try {
			clBuildProgram(nullptr, 0, nullptr, "", which == 't' ? throws : nullptr,
				       nullptr);
		} catch (const std::exception &) {
			caught++;
		}
	}
	std::printf("%ld\n", which == 'e' ? released : caught);
	return 0;
}
#endif
