// SPDX-License-Identifier: Apache-2.0
// A library whose constructor stays inside the loader until borrowed.c lets it return.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

__attribute__((constructor)) static void begin(void)
{
	void (*in_constructor)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "in_constructor");
	if (!in_constructor)
		abort();
	in_constructor();
}
