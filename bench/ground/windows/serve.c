// SPDX-License-Identifier: Apache-2.0
// The library under trial: CUPTI windows, launch hooks and interception of other CUPTI users, in a
// process that did not ask for any of it. It links to libc alone and is driven by lines written into
// the FIFO /tmp/ground-PID.fifo (made by the process that loads it); after each line it stores the number of
// lines done in /tmp/ground-PID.done. Results go to files by `dump PATH`.
//
//   init loaded|PATH              find CUPTI (the loaded copy, or load this one) and register
//   windows KINDS ON OFF N FLAGS  N windows of ON ms every ON+OFF ms (OFF varies by half)
//        KINDS: k kernels, r runtime calls, d driver calls, g graph-level, c callbacks at each launch
//        FLAGS: - none, r register again in each window, f force the flush, y yield to others,
//               z finalize CUPTI after each window, inside the exit of a synchronizing call
//   finalize                      finalize CUPTI now, from this thread
//   watch                         intercept the CUPTI calls of every other library
//   hook 0|1|2                    launch hook through import tables: off, with a clock read, without
//   flush | dump PATH
#include "windows.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

// For launch.cu and stages.cu, which measure by themselves: switch one thing on or off.
void ground_load(const char *spec)
{
	do_init(spec, true);
}

void ground_init(const char *spec)
{
	if (!records) {
		records = mmap(NULL, sizeof *records * MAX_RECORDS, 3, MAP_PRIVATE | MAP_ANONYMOUS,
			       -1, 0);
		launches = mmap(NULL, sizeof *launches * MAX_LAUNCHES, 3,
				MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	}
	do_init(spec, false);
}
void ground_window(const char *k, int on)
{
	kinds = k, flags = "r";
	if (on)
		n_records = n_launches = 0;
	if (on)
		open_window(0);
	else
		close_window(0, true);
}
int ground_finalize(void)
{
	return p_cuptiFinalize ? (int)p_cuptiFinalize() : -1;
}
void ground_register(void)
{
	p_cuptiActivityRegisterCallbacks(buffer_requested, buffer_completed);
}
void ground_finalize_at_sync(void)
{
	finalize_at_sync();
}
unsigned ground_count(int what)
{
	return what ? n_launches : n_records;
}

// ---- the driver's lines -----------------------------------------------------------------------

static void do_dump(const char *path)
{
	char name[600];
	snprintf(name, sizeof name, "%s.records", path);
	FILE *f = fopen(name, "w");
	if (f)
		fwrite(records, sizeof *records, n_records < MAX_RECORDS ? n_records : MAX_RECORDS,
		       f),
			fclose(f);
	snprintf(name, sizeof name, "%s.launches", path);
	f = fopen(name, "w");
	if (f)
		fwrite(launches, sizeof *launches,
		       n_launches < MAX_LAUNCHES ? n_launches : MAX_LAUNCHES, f),
			fclose(f);
	snprintf(name, sizeof name, "%s.json", path);
	f = fopen(name, "w");
	if (!f)
		return;
	unsigned held = 0;
	for (int i = 0; i < MAX_BUFFERS; i++)
		held += buffer_busy[i];
	fprintf(f,
		"{\"cupti\":\"%s\",\"version\":%u,\"init_ms\":[%.3f,%.3f,%.3f],\"register\":%.0f,"
		"\"foreign_buffers\":%u,"
		"\"lost_buffers\":%u,\"buffers_held\":%u,\"yields\":%u,\"patched\":%u,"
		"\"finalizes\":%u,\"finalize_missed\":%u,\"finalize_result\":%d,\"hooked\":%llu,"
		"\"windows\":[",
		what_loaded, version, init_ms[0], init_ms[1], init_ms[2], init_ms[3],
		foreign_buffers, lost_buffers, held, yields, patched_slots, finalizes,
		finalize_missed, finalize_result, (unsigned long long)hook_head);
	for (unsigned i = 0; i < n_windows; i++) {
		const struct window *w = &windows[i];
		fprintf(f, "%s[%lu,%lu,%lu,%lu,%lu,%lu,%lu,%lu,%lu,%u,%u,%u,%u]", i ? "," : "",
			w->open0, w->open1, w->close0, w->close1, w->flushed, w->open_dev,
			w->open_mono, w->close_dev, w->close_mono, w->records, w->result, w->cut,
			w->dropped);
	}
	fprintf(f, "],\"calls\":[");
	for (unsigned i = 0; i < n_calls && i < MAX_CALLS; i++)
		fprintf(f, "%s[%lu,\"%s\",%ld,%ld]", i ? "," : "", calls[i].t, calls[i].name,
			calls[i].a, calls[i].result);
	fprintf(f, "]}\n");
	fclose(f);
}

static void obey(char *line)
{
	char a[512] = "", b[64] = "-";
	double on, off;
	int n;
	if (sscanf(line, "init %511s", a) == 1)
		ground_init(a);
	else if (sscanf(line, "windows %511s %lf %lf %d %63s", a, &on, &off, &n, b) == 5) {
		if (p_cuptiActivityEnable)
			do_windows(a, on, off, n, b);
	} else if (!strncmp(line, "watch", 5))
		do_watch();
	else if (sscanf(line, "hook %d", &n) == 1)
		ground_hook(n);
	else if (!strncmp(line, "finalize", 8) && p_cuptiFinalize)
		finalize_result |= p_cuptiFinalize(), finalizes++;
	else if (!strncmp(line, "flush", 5) && p_cuptiActivityFlushAll)
		p_cuptiActivityFlushAll(1);
	else if (sscanf(line, "dump %511s", a) == 1)
		do_dump(a);
}

static void *serve(void *arg)
{
	(void)arg;
	prctl(PR_SET_NAME, "ground");
	char name[64], line[1024];
	snprintf(name, sizeof name, "/tmp/ground-%d.fifo", getpid());
	int fd = open(name, O_RDWR | O_CLOEXEC);
	snprintf(name, sizeof name, "/tmp/ground-%d.done", getpid());
	int done = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	// Not stdio: a thread that sleeps in fgets holds the stream's lock, and from glibc 2.38 or so exit()
	// waits for it for ever.
	uint64_t n = 0;
	for (size_t have = 0; fd >= 0;) {
		ssize_t got = read(fd, line + have, 1);
		if (got <= 0)
			break;
		if (line[have] != '\n') {
			have += have < sizeof line - 1;
			continue;
		}
		line[have] = 0, have = 0;
		obey(line);
		n++;
		if (pwrite(done, &n, sizeof n, 0) != sizeof n)
			break;
	}
	return NULL;
}

__attribute__((constructor)) static void begin(void)
{
	char name[64];
	snprintf(name, sizeof name, "/tmp/ground-%d.fifo", getpid());
	if (access(name, F_OK))
		return; // nobody drives: idle
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	pthread_t t;
	if (!pthread_create(&t, NULL, serve, NULL))
		pthread_detach(t);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// CUDA_INJECTION64_PATH calls this; being loaded is all that is tried here.
int InitializeInjection(void)
{
	return 1;
}
