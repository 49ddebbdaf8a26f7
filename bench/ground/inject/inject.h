// SPDX-License-Identifier: Apache-2.0
// What the injector's files share: the process it works on, the thread it has borrowed, the steps.
#pragma once
#define _GNU_SOURCE
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/user.h>

#ifndef PTRACE_GETSIGMASK
#define PTRACE_GETSIGMASK 0x420a
#define PTRACE_SETSIGMASK 0x420b
#endif
#ifndef PTRACE_EVENT_STOP
#define PTRACE_EVENT_STOP 128
#endif
#define RED_ZONE_BYTES 128
#define STACK_ROOM_BYTES (192 * 1024) // dlopen with a constructor was seen to use under 24 KiB
#define LOCK_BOUND_US 10e3
#define XSTATE_MAX_BYTES (16 * 1024)

// main.c
extern double t_start_us;
extern int done_pipe[2]; // a byte in it: this program came to its end and needs no guardian
extern pid_t pid;
extern bool scan_stack;
double now_us(void);
// Print the answer and exit: 0 loaded, 1 failed, 3 refused.
__attribute__((noreturn, format(printf, 2, 3))) void finish(int code, const char *format, ...);

// target.c: the process's memory, mappings and C library
struct range {
	uint64_t low, high;
};
extern struct range loader_text, loader_all;
extern uint64_t dlopen_at, restore_at, return_at, lock_at, unlock_at, getppid_at, errno_offset;
extern bool have_errno;
bool remote_read(uint64_t at, void *to, size_t n);
bool remote_write(uint64_t at, const void *from, size_t n);
void find_libc(void);
struct range mapping_of(uint64_t at);
bool library_mapped(const char *name);

// trace.c: ptrace, step by step
enum step { STEP_OK, STEP_LATE, STEP_GONE };
void on_alarm(int s);
enum step to_syscall(pid_t tid, double deadline_us);
enum step to_event_stop(pid_t tid, bool resume, double deadline_us);
enum step call(long nr, uint64_t a1, uint64_t a2, long *result, double deadline_us);
enum step to_sigreturn(double deadline_us, int *calls);

// thread.c: which thread, and taking it
struct borrowed {
	pid_t tid;
	struct user_regs_struct regs;
	uint8_t xstate[XSTATE_MAX_BYTES] __attribute__((aligned(64)));
	size_t xstate_bytes;
	// [frame - 16] and [frame - 8]: two return addresses before the frame's own.
	uint64_t mask, frame, text;
	double stopped_us;
};
extern struct borrowed *taken; // seen by the guardian too
bool call_is_safe(long nr);
const char *borrow(pid_t tid);

// frame.c: the signal frame that restores the thread, and putting it back by hand
void lay_frame(void);
void let_go(void);
bool put_back(int saved_errno);

// load.c
extern int aborts;
void inject(const char *library, const char *name, double bound_us, int tries, const char *scanned);

// guard.c
__attribute__((noreturn)) void guard(void);
