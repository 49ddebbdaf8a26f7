// SPDX-License-Identifier: Apache-2.0
// A program with a static array of 16 GiB, of which it touches as many MiB as the second argument is,
// that loads a plugin again and again. The array's last word holds a device function's address. After as
// many seconds as the first argument is (where the word does not lead elsewhere by then, up to the third),
// it prints: the longest dlopen in ms, page tables in kB, processor time of the thread "sonde" in ms, and
// whether the last word leads elsewhere now.
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define BYTES (16ul << 30)
static char array[BYTES] __attribute__((aligned(4096)));
static void *volatile *const last = (void *)(array + BYTES - sizeof(void *));

static double now_s(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static long page_tables_kb(void)
{
	char line[256];
	long kb = 0;
	FILE *f = fopen("/proc/self/status", "r");
	while (fgets(line, sizeof line, f))
		sscanf(line, "VmPTE: %ld", &kb);
	fclose(f);
	return kb;
}

static double thread_ms(void)
{
	char path[300], name[32] = "", line[128];
	unsigned long long ns = 0;
	DIR *tasks = opendir("/proc/self/task");
	for (struct dirent *e; (e = readdir(tasks));) {
		snprintf(path, sizeof path, "/proc/self/task/%s/comm", e->d_name);
		FILE *f = fopen(path, "r");
		if (!f || !fgets(name, sizeof name, f) || strcmp(name, "sonde\n")) {
			if (f)
				fclose(f);
			continue;
		}
		fclose(f);
		snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", e->d_name);
		f = fopen(path, "r");
		if (f && fgets(line, sizeof line, f))
			ns = strtoull(line, NULL, 10);
		if (f)
			fclose(f);
	}
	closedir(tasks);
	return (double)ns / 1e6;
}

int main(int argc, char **argv)
{
	double end_s = now_s() + atof(argv[1]), longest_s = 0;
	double last_s = argc > 3 ? now_s() + atof(argv[3]) : end_s;
	void *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchKernel");
	memset(array, 1, argc > 2 ? strtoul(argv[2], NULL, 10) << 20 : 0);
	*last = function;
	while (now_s() < end_s || (*last == function && now_s() < last_s)) {
		double began_s = now_s();
		void *plugin = dlopen("libm.so.6", RTLD_NOW);
		if (plugin)
			dlclose(plugin);
		double took_s = now_s() - began_s;
		longest_s = took_s > longest_s ? took_s : longest_s;
		usleep(5000);
	}
	printf("%.1f %ld %.1f %d\n", longest_s * 1e3, page_tables_kb(), thread_ms(),
	       *last != function);
	return 0;
}
