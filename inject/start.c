// SPDX-License-Identifier: Apache-2.0
// How the library starts, starts again in a forked child, and what happens when the process exits.
#include "internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Atomic uint32_t again_lock;
static uint32_t generation;
static __thread bool holds_walking __attribute__((tls_model("initial-exec")));

static uint32_t number(const char **text)
{ // not strtoul, whose name newer C libraries change
	uint32_t n = 0;
	for (; *text && **text >= '0' && **text <= '9'; ++*text)
		n = n * 10 + (uint32_t)(**text - '0');
	return n;
}

// SONDE_INJECT=REQUEST:PER_SECOND, for a program that is started by Sonde: begin with that, as if an agent had
// written it with a heartbeat, before one has found us.
static void start_from_env(void)
{
	const char *value = getenv("SONDE_INJECT");
	uint32_t request = number(&value);
	if (!request || *value++ != ':')
		return;
	struct inject_control *c = shared.control;
	c->per_second = number(&value);
	c->request = request & (INJECT_EVENTS | INJECT_OPENCL | INJECT_STACKS);
	c->heartbeat_ns = now_ns() + INJECT_AHEAD_NS;
}

static void start(void)
{
	if (!sampling_create() || !shared_create(++generation))
		return;
	start_from_env();
	if (!thread_start())
		shared_forget();
}

static void before_fork(void)
{ // 50 ms at most: the thread that walks the modules may wait for a lock whose holder waits for this fork
	for (int i = 0; i < 50; i++) {
		holds_walking = !pthread_mutex_trylock(&modules_walking);
		if (holds_walking)
			return;
		nap(1000000);
	}
}

static void after_fork_in_parent(void)
{
	if (holds_walking)
		pthread_mutex_unlock(&modules_walking);
}

static void after_fork_in_child(void)
{
	pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
	modules_walking = fresh;
	steps_forget();
	trace_forget();
	if (shared.header && sampling_create())
		atomic_store(&sampling->armed, ARMED_AGAIN);
}

// What pthread_atfork is in glibc. Weak, as the name below: a child with another C library (musl) that
// inherits LD_PRELOAD would not start for want of it.
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *)
	__attribute__((weak));
extern const char *gnu_get_libc_version(void) __attribute__((weak));
extern char __dso_handle __attribute__((visibility("hidden")));

// Not in the constructor: fork() holds the lock of this list while it waits for that of open files,
// which an attach holds over the load (docs/design/attach.md), so both would wait for ever.
void watch_forks(void)
{
	static bool watched; // a forked child inherits the list, and this variable with it
	if (!watched) {
		watched = true;
		__register_atfork(before_fork, after_fork_in_parent, after_fork_in_child,
				  &__dso_handle);
	}
}

// In a forked child, at its first launch: memory and a separate thread.
void start_again_after_fork(void)
{
	if (atomic_exchange(&again_lock, 1))
		return;
	atomic_store(&sampling->armed, 0);
	shared_forget();
	sampling_forget();
	backends_forget();
	start();
	atomic_store(&again_lock, 0);
}

// The process exits: what happened already is read, then our thread stays out of device libraries, whose
// own handlers come next.
static void at_exit(void)
{
	arm(false);
	if (!shared.header || shared.header->pid != (uint32_t)getpid())
		return; // a child, without our thread
	thread_end();
}

// Handlers run in the reverse order of their registration, and device libraries register theirs when they are
// first used.
void watch_exit(void)
{
	static _Atomic bool
		watched; // a forked child inherits the handler, and this variable with it
	if (!atomic_load_explicit(&watched, memory_order_relaxed) &&
	    !atomic_exchange(&watched, true))
		atexit(at_exit);
}

__attribute__((constructor)) static void loaded(void)
{
	if (!gnu_get_libc_version || !__register_atfork)
		return; // tried with glibc alone
	const char *value = getenv("SONDE_INJECT");
	if ((value && !strcmp(value, "off")) || other_copy_is_here())
		return;
	start();
	atexit(at_exit);
}

// CUDA_INJECTION64_PATH: the driver calls this after loading. Nothing is left to do.
__attribute__((visibility("default"))) int InitializeInjection(void)
{
	return 1;
}
