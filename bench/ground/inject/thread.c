// SPDX-License-Identifier: Apache-2.0
// Which thread may be borrowed, and taking it.
#include "inject.h"

#include <elf.h>
#include <errno.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define SCAN_BYTES (256 * 1024)

// Calls that sleep, that C libraries make outside their own locks, and that restart unnoticed.
bool call_is_safe(long nr)
{
	switch (nr) {
	case SYS_poll:
	case SYS_ppoll:
	case SYS_select:
	case SYS_pselect6:
	case SYS_epoll_wait:
	case SYS_epoll_pwait:
	case SYS_nanosleep:
	case SYS_clock_nanosleep:
	case SYS_read:
	case SYS_recvfrom:
	case SYS_recvmsg:
	case SYS_accept:
	case SYS_accept4:
	case SYS_wait4:
	case SYS_waitid:
	case SYS_rt_sigtimedwait:
	case SYS_pause:
		return true;
	default:
		return false;
	}
}

static bool call_was_interrupted(const struct user_regs_struct *r)
{
	long ax = (long)r->rax;
	if (ax <= -512 && ax >= -516 && ax != -515)
		return true;
	// These two answer EINTR to a mere stop; they are restarted by hand.
	return ax == -EINTR &&
	       ((long)r->orig_rax == SYS_epoll_wait || (long)r->orig_rax == SYS_epoll_pwait);
}

// NULL, or why this thread's stack is not to be borrowed.
static const char *stack_refusal(uint64_t sp)
{
	struct range m = mapping_of(sp);
	if (!m.high)
		return "stack pointer outside any mapping";
	if (sp - m.low < STACK_ROOM_BYTES)
		return "too little stack";
	if (!scan_stack)
		return NULL;
	size_t n = m.high - sp < SCAN_BYTES ? m.high - sp : SCAN_BYTES;
	static uint64_t words[SCAN_BYTES / 8];
	if (!remote_read(sp, words, n & ~7ul))
		return "cannot read the stack";
	for (size_t i = 0; i < n / 8; i++) {
		if (words[i] == restore_at)
			return "inside a signal handler";
		if (words[i] >= loader_text.low && words[i] < loader_text.high)
			return "inside the loader";
	}
	return NULL;
}

// Borrow `tid` if it is where we may take it. NULL, or the reason why not.
const char *borrow(pid_t tid)
{
	taken->tid = tid;
	if (ptrace(PTRACE_SEIZE, tid, 0, PTRACE_O_TRACESYSGOOD))
		return errno == EPERM ? "not permitted, or already traced" : "gone";
	taken->stopped_us = now_us();
	const char *why = NULL;
	if (to_event_stop(tid, false, now_us() + 50e3) != STEP_OK)
		why = "did not stop";
	else if (ptrace(PTRACE_GETREGS, tid, 0, &taken->regs))
		why = "gone";
	else if (taken->regs.cs != 0x33)
		why = "32-bit code";
	else if (!call_is_safe((long)taken->regs.orig_rax) || !call_was_interrupted(&taken->regs))
		why = "moved on";
	else
		why = stack_refusal(taken->regs.rsp);
	if (!why) {
		struct iovec x = {taken->xstate, sizeof taken->xstate};
		if (ptrace(PTRACE_GETREGSET, tid, NT_X86_XSTATE, &x))
			why = "no extended state";
		taken->xstate_bytes = x.iov_len;
		if (ptrace(PTRACE_GETSIGMASK, tid, 8, &taken->mask))
			why = "no signal mask";
	}
	if (!why)
		return NULL;
	// epoll answers EINTR to the stop itself; do not let the program see it.
	if ((long)taken->regs.rax == -EINTR && call_was_interrupted(&taken->regs)) {
		struct user_regs_struct r = taken->regs;
		r.rip -= 2, r.rax = r.orig_rax, r.orig_rax = -1;
		ptrace(PTRACE_SETREGS, tid, 0, &r);
	}
	let_go();
	return why;
}
