// SPDX-License-Identifier: Apache-2.0
// Remote dlopen into a live x86-64 glibc process: the prototype that docs/design/device_time.md judges.
//
//   inject PID LIBRARY [--timeout-ms N] [--wait-ms N] [--die-us N] [--no-scan]
//
// One thread is borrowed, the others never stop. The rules that make it safe:
//   * only a thread asleep in an interruptible call of a fixed list is taken, never one in a futex
//     (it may wait for malloc's or the loader's lock while it holds the other);
//   * a stack that holds a signal frame or a return address inside the loader is refused;
//   * before the thread runs anything, a genuine signal frame with its registers, extended state and
//     signal mask is laid below its red zone, and every foreign step returns into the C library's own
//     `rt_sigreturn` stub. From then on this program may be killed at any instant: the thread restores
//     itself;
//   * the load runs under the C library's list lock of open files, which fork() takes too: no child can be
//     born with a half-changed loader (without this, 1 fork storm in 2 lost a child in 20 attaches);
//   * signals stay blocked meanwhile, so no handler runs on top of (or jumps out of) the loader;
//   * a stop is bounded: a thread that has waited LOCK_BOUND_US for the loader's lock is put back and the
//     attach tried again later (fork, dlclose and the guard above can block each other in a ring);
//     a guardian process does the same should this one be killed meanwhile;
//     past the hard limit it is let go and finishes by itself.
// The answer is one line of JSON. Exit: 0 loaded, 1 failed, 3 refused (with the reason).
#include "inject.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

double t_start_us;
int done_pipe[2] = {-1, -1};
pid_t pid;
bool scan_stack = true;
struct borrowed *taken;

double now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

__attribute__((noreturn, format(printf, 2, 3))) void finish(int code, const char *format, ...)
{
	va_list ap;
	va_start(ap, format);
	printf("{\"ok\":%s,\"total_us\":%.0f,", code ? "false" : "true", now_us() - t_start_us);
	vprintf(format, ap);
	printf("}\n");
	va_end(ap);
	fflush(stdout);
	if (done_pipe[1] >= 0 && write(done_pipe[1], "d", 1) != 1)
		code = 1;
	_exit(code);
}

static bool reads_from_a_queue(pid_t tid, long fd)
{
	char path[64], to[64];
	snprintf(path, sizeof path, "/proc/%d/task/%d/fd/%ld", pid, tid, fd);
	ssize_t n = readlink(path, to, sizeof to - 1);
	if (n <= 0)
		return false;
	to[n] = 0;
	return !strncmp(to, "pipe:", 5) || !strncmp(to, "socket:", 7) ||
	       !strncmp(to, "anon_inode:", 11);
}

int main(int argc, char **argv)
{
	if (argc < 3)
		finish(1, "\"why\":\"usage: inject PID LIBRARY\"");
	t_start_us = now_us();
	pid = atoi(argv[1]);
	double bound_us = 1e6, wait_us = 5e6, die_us = 0;
	for (int i = 3; i < argc; i++) {
		if (!strcmp(argv[i], "--timeout-ms"))
			bound_us = atof(argv[++i]) * 1e3;
		else if (!strcmp(argv[i], "--wait-ms"))
			wait_us = atof(argv[++i]) * 1e3;
		else if (!strcmp(argv[i], "--die-us"))
			die_us = atof(argv[++i]);
		else if (!strcmp(argv[i], "--no-scan"))
			scan_stack = false;
	}
	struct sigaction sa = {.sa_handler = on_alarm};
	sigaction(SIGALRM, &sa, NULL);
	taken = mmap(NULL, sizeof *taken, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		     0);
	find_libc();
	if (taken == MAP_FAILED || pipe2(done_pipe, O_CLOEXEC))
		finish(1, "\"why\":\"no memory\"");
	pid_t guardian = fork();
	if (guardian == 0)
		guard();
	if (guardian < 0)
		finish(1, "\"why\":\"no guardian\"");
	char path[64], line[256], last[64] = "none";
	snprintf(path, sizeof path, "/proc/%d/status", pid);
	FILE *f = fopen(path, "r");
	while (f && fgets(line, sizeof line, f)) {
		if (!strncmp(line, "TracerPid:", 10) && atoi(line + 10))
			finish(3, "\"why\":\"already traced\"");
		if (!strncmp(line, "x86_Thread_features:", 20) && strstr(line, "shstk"))
			finish(3, "\"why\":\"a shadow stack is on, which is not proved\"");
		if (!strncmp(line, "Seccomp:", 8) && atoi(line + 8))
			finish(3, "\"why\":\"a seccomp filter is on\"");
		if (!strncmp(line, "State:", 6) && strchr("TtZX", line[7]))
			finish(3, "\"why\":\"stopped or dead\"");
	}
	if (f)
		fclose(f);
	char name[64];
	snprintf(name, sizeof name, "ground-%d-%ld", getpid(), (long)t_start_us % 100000000);
	if (die_us > 0) { // a rehearsal of this program's own violent death
		pid_t self = getpid();
		if (fork() == 0) {
			close(done_pipe[1]);
			double until = t_start_us + die_us;
			while (now_us() < until) {
			}
			kill(self, SIGKILL);
			_exit(0);
		}
	}
	int tries = 0;
	while (now_us() - t_start_us < wait_us) {
		snprintf(path, sizeof path, "/proc/%d/task", pid);
		DIR *d = opendir(path);
		if (!d)
			finish(1, "\"why\":\"the process went away\"");
		for (struct dirent *e; (e = readdir(d));) {
			pid_t tid = atoi(e->d_name);
			char p[96];
			long nr, a1;
			if (!tid)
				continue;
			snprintf(p, sizeof p, "/proc/%d/task/%d/syscall", pid, tid);
			FILE *g = fopen(p, "r");
			int got = g ? fscanf(g, "%ld %lx", &nr, (unsigned long *)&a1) : 0;
			if (g)
				fclose(g);
			if (got < 2 || !call_is_safe(nr))
				continue;
			if (nr == SYS_read && !reads_from_a_queue(tid, a1))
				continue;
			tries++;
			const char *why = borrow(tid);
			if (!why) {
				inject(argv[2], name, bound_us, tries, last);
				why = "the loader was busy";
				usleep(2000);
			}
			snprintf(last, sizeof last, "%s", why);
			if (!strncmp(why, "not permitted", 13))
				finish(3, "\"why\":\"%s\"", why);
		}
		closedir(d);
		usleep(500);
	}
	finish(3,
	       "\"why\":\"no thread could be borrowed in "
	       "time\",\"tries\":%d,\"aborts\":%d,\"last\":\"%s\"",
	       tries, aborts, last);
}
