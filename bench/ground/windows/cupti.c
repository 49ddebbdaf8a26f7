// SPDX-License-Identifier: Apache-2.0
// Finding CUPTI, the loaded copy or one of ours, and its functions.
#include "windows.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define DEFINE(f) __typeof__(f) *p_##f;
FUNCTIONS(DEFINE)
char what_loaded[512];
double init_ms[4];
uint32_t version;

int find_loaded(struct dl_phdr_info *i, size_t n, void *to)
{
	(void)n;
	if (!i->dlpi_name || !strstr(i->dlpi_name, "libcupti.so"))
		return 0;
	snprintf(to, sizeof what_loaded, "%s", i->dlpi_name);
	return 1;
}

void do_init(const char *spec, bool only_load)
{
	uint64_t t0 = now_ns();
	const char *path = spec;
	if (!strcmp(spec, "loaded")) {
		if (!dl_iterate_phdr(find_loaded, what_loaded))
			snprintf(what_loaded, sizeof what_loaded, "none loaded");
		path = what_loaded;
	} else {
		snprintf(what_loaded, sizeof what_loaded, "%s", spec);
	}
	void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!h) {
		snprintf(what_loaded, sizeof what_loaded, "error: %s", dlerror());
		return;
	}
	uint64_t t1 = now_ns();
#define RESOLVE(f) p_##f = (__typeof__(p_##f))dlsym(h, #f);
	FUNCTIONS(RESOLVE)
	p_cuptiGetVersion(&version);
	if (only_load)
		return;
	uint64_t t2 = now_ns();
	int r = p_cuptiActivityRegisterCallbacks(buffer_requested, buffer_completed);
	uint64_t t3 = now_ns();
	init_ms[0] = (t1 - t0) / 1e6, init_ms[1] = (t2 - t1) / 1e6, init_ms[2] = (t3 - t2) / 1e6,
	init_ms[3] = r;
}
