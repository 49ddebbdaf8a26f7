// SPDX-License-Identifier: Apache-2.0
// Other users of CUPTI, seen at their import tables: their calls are logged, and we step aside.
#include "windows.h"

#include <dlfcn.h>
#include <stdio.h>

struct call calls[MAX_CALLS];
atomic_uint n_calls;
atomic_bool foreign_active;
atomic_ullong foreign_last;
unsigned yields;

static void log_call(const char *name, int64_t a, int64_t result)
{
	unsigned i = n_calls++;
	if (i >= MAX_CALLS)
		return;
	calls[i].t = now_ns(), calls[i].a = a, calls[i].result = result;
	snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
}

// Another user is about to touch what we hold: give it back first, and stay away.
static void step_aside(void)
{
	foreign_last = now_ns();
	if (!may_yield)
		return;
	pthread_mutex_lock(&owner);
	if (!foreign_active)
		yields++;
	foreign_active = true;
	if (window_open && n_windows) {
		windows[n_windows - 1].cut = 1;
		close_window(n_windows - 1, true);
	}
	pthread_mutex_unlock(&owner);
}

// clang-format off
#define OTHERS(X) \
	X(cuptiSubscribe) X(cuptiUnsubscribe) \
	X(cuptiFinalize) X(cuptiActivityRegisterCallbacks) \
	X(cuptiActivityEnable) X(cuptiActivityDisable) \
	X(cuptiActivityFlushAll) X(cuptiActivityRegisterTimestampCallback) \
	X(cuptiActivitySetAttribute) X(cuptiEnableDomain) \
	X(cuptiEnableCallback) X(cuptiSubscribe_v2)
// clang-format on
typedef int any(long, long, long, long);
#define OTHER(f)                                                                                   \
	static any *real_##f;                                                                      \
	static int other_##f(long a, long b, long c, long d)                                       \
	{                                                                                          \
		step_aside();                                                                      \
		int r = real_##f(a, b, c, d);                                                      \
		foreign_last = now_ns();                                                           \
		log_call(#f, a, r);                                                                \
		return r;                                                                          \
	}
OTHERS(OTHER)

void do_watch(void)
{
	if (dl_iterate_phdr(find_loaded, what_loaded)) {
		void *h = dlopen(what_loaded, RTLD_NOW | RTLD_NOLOAD);
#define REAL(f)                                                                                    \
	if (h && !real_##f)                                                                        \
		real_##f = (any *)dlsym(h, #f);
		OTHERS(REAL)
	}
#define WATCH(f) {#f, (void *)other_##f, (void **)&real_##f},
	struct patch p[] = {OTHERS(WATCH){NULL, NULL, NULL}};
	dl_iterate_phdr(patch_object, p);
}
