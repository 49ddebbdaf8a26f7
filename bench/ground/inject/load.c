// SPDX-License-Identifier: Apache-2.0
// The load itself, on the borrowed thread.
#include "inject.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int aborts;

static int write_library(const char *file, int remote_fd)
{
	char path[64], buffer[65536];
	snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, remote_fd);
	int to = open(path, O_RDWR | O_CLOEXEC), from = open(file, O_RDONLY | O_CLOEXEC);
	ssize_t n = -1;
	while (to >= 0 && from >= 0 && (n = read(from, buffer, sizeof buffer)) > 0)
		if (write(to, buffer, n) != n) {
			n = -1;
			break;
		}
	if (n == 0 &&
	    fcntl(to, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL))
		n = -1;
	close(to);
	close(from);
	return n == 0 ? 0 : -1;
}

// Load the library on the borrowed thread. Returns only if the loader was busy: try again later.
void inject(const char *library, const char *name, double bound_us, int tries, const char *scanned)
{
	double deadline = now_us() + bound_us;
	long nr = (long)taken->regs.orig_rax, fd = -1, closed;
	int calls = 0, saved_errno = 0;
	uint64_t all = ~0ul;
	enum step s = STEP_GONE;
	const char *stage = "start";
	char path[128];
	lay_frame();
	if (have_errno)
		remote_read(taken->regs.fs_base + errno_offset, &saved_errno, 4);
	struct user_regs_struct r = taken->regs;
	r.rip = restore_at, r.rsp = taken->frame + 8, r.orig_rax = -1, r.eflags &= ~0x500ul;
	if (ptrace(PTRACE_SETSIGMASK, taken->tid, 8, &all) ||
	    ptrace(PTRACE_SETREGS, taken->tid, 0, &r))
		goto out;
	if ((s = to_syscall(taken->tid, deadline)) != STEP_OK)
		goto out; // at the entry of rt_sigreturn
	stage = "memfd_create";
	snprintf(path, sizeof path, "%s", name);
	if (!remote_write(taken->text, path, strlen(path) + 1))
		goto out;
	// CLOEXEC, ALLOW_SEALING and, where the kernel knows it (6.3), EXEC.
	if ((s = call(SYS_memfd_create, taken->text, 0x13, &fd, deadline)) != STEP_OK)
		goto out;
	if (fd == -EINVAL) {
		if ((s = to_syscall(taken->tid, deadline)) != STEP_OK)
			goto out;
		if ((s = call(SYS_memfd_create, taken->text, 3, &fd, deadline)) != STEP_OK)
			goto out;
	}
	if (fd < 0) {
		stage = "memfd_create refused";
		s = STEP_LATE;
		goto out;
	}
	stage = "write";
	if (write_library(library, (int)fd)) {
		s = STEP_LATE;
		goto out;
	}
	// lock -> getppid (where we take over again) -> unlock -> rt_sigreturn: safe to be killed anywhere.
	stage = "fork guard";
	if (ptrace(PTRACE_GETREGS, taken->tid, 0, &r))
		goto out;
	r.rip = lock_at, r.rsp = taken->frame - 16, r.orig_rax = -1;
	if (ptrace(PTRACE_SETREGS, taken->tid, 0, &r))
		goto out;
	do {
		if ((s = to_syscall(taken->tid, deadline)) != STEP_OK)
			goto out;
		if (ptrace(PTRACE_GETREGS, taken->tid, 0, &r)) {
			s = STEP_GONE;
			goto out;
		}
	} while ((long)r.orig_rax != SYS_getppid);
	if ((s = to_syscall(taken->tid, deadline)) != STEP_OK)
		goto out;
	if (!remote_write(taken->frame - 16, &return_at, 8))
		goto out;
	stage = "dlopen";
	// The loader knows libraries by the text of their path: "/proc/self/fd/3" twice is one library.
	// So every load spells its path its own way, with "/" or "/./" by the bits of the time.
	char *p = path + sprintf(path, "/proc/self/fd");
	for (uint64_t k = (uint64_t)t_start_us & 0xfffffff; k; k >>= 1)
		p = stpcpy(p, k & 1 ? "/." : "/");
	sprintf(p, "/%ld", fd);
	if (!remote_write(taken->text, path, strlen(path) + 1) ||
	    ptrace(PTRACE_GETREGS, taken->tid, 0, &r))
		goto out;
	r.rip = dlopen_at, r.rsp = taken->frame - 16, r.rdi = taken->text, r.rsi = 2 /* RTLD_NOW */,
	r.rax = 0, r.orig_rax = -1;
	if (ptrace(PTRACE_SETREGS, taken->tid, 0, &r))
		goto out;
	while ((s = to_sigreturn(now_us() + LOCK_BOUND_US, &calls)) == STEP_LATE &&
	       now_us() < deadline) {
		if ((s = to_event_stop(taken->tid, false, deadline)) != STEP_OK)
			goto out;
		if (ptrace(PTRACE_GETREGS, taken->tid, 0, &r)) {
			s = STEP_GONE;
			goto out;
		}
		if ((long)r.orig_rax != SYS_futex || r.rdi < loader_all.low ||
		    r.rdi >= loader_all.high)
			continue;
		// It waits for the loader's own lock, the first that dlopen takes: it holds nothing of the loader.
		stage = "abort";
		r.rip = unlock_at, r.rsp = taken->frame, r.orig_rax = -1;
		if (ptrace(PTRACE_SETREGS, taken->tid, 0, &r)) {
			s = STEP_GONE;
			goto out;
		}
		if ((s = to_sigreturn(deadline, &calls)) != STEP_OK)
			goto out;
		break;
	}
	if (s != STEP_OK)
		goto out;
	bool aborted = !strcmp(stage, "abort");
	stage = "close";
	if ((s = call(SYS_close, fd, 0, &closed, deadline)) != STEP_OK)
		goto out;
	if ((s = to_event_stop(taken->tid, true, deadline)) != STEP_OK)
		goto out;
	stage = "put back";
	if (!put_back(saved_errno)) {
		s = STEP_GONE;
		goto out;
	}
	double stop_us = now_us() - taken->stopped_us;
	if (aborted) {
		aborts++;
		return;
	}
	if (!library_mapped(name))
		finish(1, "\"why\":\"dlopen failed\",\"stop_us\":%.0f", stop_us);
	finish(0,
	       "\"tid\":%d,\"syscall\":%ld,\"ret\":%ld,\"stop_us\":%.0f,\"tries\":%d,\"calls\":%d,"
	       "\"aborts\":%d,\"passed_over\":\"%s\"",
	       taken->tid, nr, (long)taken->regs.rax, stop_us, tries, calls, aborts, scanned);
out:
	if (s == STEP_GONE) {
		let_go();
		finish(1, "\"why\":\"the thread went away\",\"stage\":\"%s\"", stage);
	}
	// Late. Before the load nothing is held and the thread is put back; in it, it finishes by itself.
	bool before = strcmp(stage, "dlopen") && strcmp(stage, "abort") && strcmp(stage, "close");
	if (before && to_event_stop(taken->tid, false, now_us() + 100e3) == STEP_OK)
		put_back(saved_errno);
	else
		let_go();
	finish(1, "\"why\":\"%s\",\"stage\":\"%s\",\"stop_us\":%.0f",
	       before ? "put back" : "let go", stage, now_us() - taken->stopped_us);
}
