// SPDX-License-Identifier: Apache-2.0
// The table of backends, and what the library's thread does with all of them.
#include "internal.h"

static const struct backend *const backends[] = {&cuda_backend, &opencl_backend};

#define BACKENDS (sizeof backends / sizeof *backends)
_Static_assert(BACKENDS == MOST_LISTS, "a list of hooks for each backend");

enum inject_reason backends_begin(uint32_t request)
{
	enum inject_reason reason = INJECT_NO_LIBRARY;
	for (unsigned k = 0; k < BACKENDS; k++) {
		if (!(request & backends[k]->requests))
			continue;
		enum inject_reason found = backends[k]->begin();
		if (reason == INJECT_NO_LIBRARY)
			reason = found;
	}
	return reason;
}

unsigned backends_hook(bool in, bool only_new)
{
	unsigned count = 0;
	for (unsigned k = 0; k < BACKENDS; k++)
		count += backends[k]->hook(in, only_new);
	return count;
}

void backends_hooks(const struct hooks *lists[MOST_LISTS])
{
	for (unsigned k = 0; k < BACKENDS; k++)
		lists[k] = backends[k]->hooks();
}

unsigned backends_by_loader(void)
{
	unsigned count = 0;
	for (unsigned k = 0; k < BACKENDS; k++)
		count += backends[k]->by_loader ? backends[k]->by_loader() : 0;
	return count;
}

void backends_unhooked(void)
{
	for (unsigned k = 0; k < BACKENDS; k++)
		if (backends[k]->unhooked)
			backends[k]->unhooked();
}

void backends_poll(bool timing)
{
	for (unsigned k = 0; k < BACKENDS; k++)
		if (timing || backends[k]->pending())
			backends[k]->poll();
}

bool backends_pending(void)
{
	for (unsigned k = 0; k < BACKENDS; k++)
		if (backends[k]->pending())
			return true;
	return false;
}

bool backends_yield(void)
{
	for (unsigned k = 0; k < BACKENDS; k++)
		if (backends[k]->yields && backends[k]->yields())
			return true;
	return false;
}

void backends_forget(void)
{
	for (unsigned k = 0; k < BACKENDS; k++)
		backends[k]->forget();
}
