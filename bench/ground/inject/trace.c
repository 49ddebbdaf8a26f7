// SPDX-License-Identifier: Apache-2.0
// ptrace, step by step: to a system call's boundary, to a stop in the kernel's signal path.
#include "inject.h"

#include <errno.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

static volatile sig_atomic_t alarmed;
void on_alarm(int s)
{
	(void)s;
	alarmed = 1;
}

// Wait for a stop of `tid` until `deadline_us`: 1 stopped, 0 time is up, -1 gone.
static int wait_stop(pid_t tid, int *status, double deadline_us)
{
	for (;;) {
		double left = deadline_us - now_us();
		if (left <= 0)
			left = 1;
		struct itimerval t = {{0, 2000}, {(long)(left / 1e6), (long)left % 1000000 + 1}};
		alarmed = 0;
		setitimer(ITIMER_REAL, &t, NULL);
		pid_t r = waitpid(tid, status, __WALL);
		struct itimerval off = {{0, 0}, {0, 0}};
		setitimer(ITIMER_REAL, &off, NULL);
		if (r == tid)
			return WIFSTOPPED(*status) ? 1 : -1;
		if (r < 0 && errno == EINTR) {
			if (now_us() >= deadline_us)
				return 0;
			continue;
		}
		return -1;
	}
}

static bool is_event_stop(int st)
{
	return st >> 16 == PTRACE_EVENT_STOP;
}
static bool is_syscall_stop(int st)
{
	return WSTOPSIG(st) == (SIGTRAP | 0x80);
}

// Run to the next system call boundary. Signals are blocked; what still arrives is passed on.
enum step to_syscall(pid_t tid, double deadline_us)
{
	long deliver = 0;
	for (;;) {
		int st;
		if (ptrace(PTRACE_SYSCALL, tid, 0, deliver))
			return STEP_GONE;
		int r = wait_stop(tid, &st, deadline_us);
		if (r < 0)
			return STEP_GONE;
		if (r == 0)
			return STEP_LATE;
		if (is_syscall_stop(st))
			return STEP_OK;
		deliver = is_event_stop(st) ? 0 : WSTOPSIG(st);
	}
}

// Stop inside the kernel's signal path, where system calls are restarted by its own rules.
enum step to_event_stop(pid_t tid, bool resume, double deadline_us)
{
	if (ptrace(PTRACE_INTERRUPT, tid, 0, 0))
		return STEP_GONE;
	if (resume && ptrace(PTRACE_CONT, tid, 0, 0))
		return STEP_GONE;
	for (;;) {
		int st;
		int r = wait_stop(tid, &st, deadline_us);
		if (r < 0)
			return STEP_GONE;
		if (r == 0)
			return STEP_LATE;
		if (is_event_stop(st))
			return STEP_OK;
		// Any other stop has used the interrupt up (kernel/signal.c, ptrace_stop): ask again.
		if (ptrace(PTRACE_INTERRUPT, tid, 0, 0))
			return STEP_GONE;
		if (ptrace(PTRACE_CONT, tid, 0, is_syscall_stop(st) ? 0 : WSTOPSIG(st)))
			return STEP_GONE;
	}
}

// At the entry of rt_sigreturn: run another call in its place, then come to its exit. Whatever happens
// to us, the thread goes on to the stub again and so to its old state.
enum step call(long nr, uint64_t a1, uint64_t a2, long *result, double deadline_us)
{
	struct user_regs_struct r;
	if (ptrace(PTRACE_GETREGS, taken->tid, 0, &r))
		return STEP_GONE;
	r.orig_rax = nr, r.rdi = a1, r.rsi = a2, r.rip = restore_at;
	if (ptrace(PTRACE_SETREGS, taken->tid, 0, &r))
		return STEP_GONE;
	enum step s = to_syscall(taken->tid, deadline_us);
	if (s != STEP_OK)
		return s;
	if (ptrace(PTRACE_GETREGS, taken->tid, 0, &r))
		return STEP_GONE;
	*result = (long)r.rax;
	return STEP_OK;
}

enum step to_sigreturn(double deadline_us, int *calls)
{
	for (;;) {
		enum step s = to_syscall(taken->tid, deadline_us);
		if (s != STEP_OK)
			return s;
		struct user_regs_struct r;
		if (ptrace(PTRACE_GETREGS, taken->tid, 0, &r))
			return STEP_GONE;
		++*calls;
		if (r.orig_rax == SYS_rt_sigreturn && r.rip == restore_at + 9 &&
		    r.rsp == taken->frame + 8)
			return STEP_OK;
	}
}
