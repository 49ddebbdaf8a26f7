// SPDX-License-Identifier: Apache-2.0
#include "inject.h"

#include <sys/syscall.h>
#include <unistd.h>

// A second process that outlives this one's violent death. The thread needs no help to come back, except
// where it waits for the loader in a ring of locks: there it is sent on to the unlock.
void guard(void)
{
	char byte;
	close(done_pipe[1]);
	close(0), close(1), close(2);
	setsid();
	if (read(done_pipe[0], &byte, 1) == 1)
		_exit(0);
	for (int i = 0; i < 100 && taken->tid; i++) {
		struct user_regs_struct r;
		usleep((useconds_t)LOCK_BOUND_US);
		if (ptrace(PTRACE_SEIZE, taken->tid, 0, PTRACE_O_TRACESYSGOOD))
			_exit(0);
		if (to_event_stop(taken->tid, false, now_us() + 50e3) == STEP_OK &&
		    !ptrace(PTRACE_GETREGS, taken->tid, 0, &r)) {
			bool ours = r.rsp < taken->frame && r.rsp > taken->frame - STACK_ROOM_BYTES;
			if (ours && (long)r.orig_rax == SYS_futex && r.rdi >= loader_all.low &&
			    r.rdi < loader_all.high) {
				r.rip = unlock_at, r.rsp = taken->frame, r.orig_rax = -1;
				ptrace(PTRACE_SETREGS, taken->tid, 0, &r);
				ours = false;
			}
			let_go();
			if (!ours)
				_exit(0);
		} else {
			let_go();
		}
	}
	_exit(0);
}
