// SPDX-License-Identifier: Apache-2.0
// Preloaded: kills its process right before the ptrace call whose number is MORTAL_AT, of those that set a
// thread's state or let it run. Children that it forks live on.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

#include <sys/ptrace.h>

static pid_t mortal;
static int calls, last;

__attribute__((constructor)) static void begin(void)
{
	const char *at = getenv("MORTAL_AT");

	mortal = getpid();
	last = at ? atoi(at) : 0;
}

static int changes(int request)
{
	switch (request) {
	case PTRACE_SEIZE:
	case PTRACE_INTERRUPT:
	case PTRACE_SETREGS:
	case PTRACE_SETREGSET:
	case PTRACE_SETSIGMASK:
	case PTRACE_SYSCALL:
	case PTRACE_CONT:
	case PTRACE_DETACH:
		return 1;
	default:
		return 0;
	}
}

long ptrace(enum __ptrace_request request, ...)
{
	static long (*next)(enum __ptrace_request, pid_t, void *, void *);
	va_list rest;
	pid_t pid;
	void *address, *data;

	va_start(rest, request);
	pid = va_arg(rest, pid_t);
	address = va_arg(rest, void *);
	data = va_arg(rest, void *);
	va_end(rest);

	if (changes(request) && getpid() == mortal && ++calls == last)
		kill(mortal, SIGKILL);
	if (!next)
		*(void **)&next = dlsym(RTLD_NEXT, "ptrace");
	return next(request, pid, address, data);
}
