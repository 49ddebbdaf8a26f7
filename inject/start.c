// SPDX-License-Identifier: Apache-2.0
// How the library begins, what its one thread does, and what becomes of it in a forked child.
#include "own.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TURN_NS 5000000u
#define QUIET_NS 20000000u
#define IDLE_TURN_NS 250000000u
#define LOOK_NS 1000000000ull
#define FULL_LOOK_NS 60000000000ull
#define LOOKS_SHARE 50u		     /* looks take one part of so many of a processor's time */
#define FIRST_LOOKS_NS 4000000000ull /* but for the first: a framework's data takes two seconds */
#define BETWEEN_FIRST_NS 1000000u

static _Atomic uint64_t correlations;
static _Atomic uint32_t again_lock;
static uint32_t generation;
static __thread bool holds_walking __attribute__((tls_model("initial-exec")));

uint64_t next_correlation(void)
{
	return atomic_fetch_add_explicit(&correlations, 1, memory_order_relaxed) + 1;
}

// ---- steps: when our thread is in a device library -------------------------------------------------

#define STEP_WAIT_NS 2000000000ull
#define LAST_TURN_NS 50000000ull

static _Atomic bool exiting;
static _Atomic int stepping, stoppers;
static _Atomic bool closed, last_turn_is_over;

bool step_is_unwanted(void)
{
	return atomic_load(&stoppers) > 0 || atomic_load(&closed);
}

bool step_begin(void)
{
	atomic_store(&stepping, 1);
	if (likely(!step_is_unwanted()))
		return true;
	atomic_store(&stepping, 0);
	return false;
}

void step_end(void)
{
	atomic_store(&stepping, 0);
}

static void short_nap(int turn)
{
	struct timespec t = {0, 20000};
	if (turn > 100)
		clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
	else
		__builtin_ia32_pause();
}

static void wait_for_step(void)
{ // bounded: a driver that hangs must not hang the host
	uint64_t until = now_ns() + STEP_WAIT_NS;
	for (int i = 0; atomic_load(&stepping) && now_ns() < until; i++)
		short_nap(i);
}

void steps_stop(void)
{
	atomic_fetch_add(&stoppers, 1);
	wait_for_step();
}

void steps_go_on(void)
{
	atomic_fetch_sub(&stoppers, 1);
}

static void forget_steps(void)
{
	atomic_store(&stepping, 0);
	atomic_store(&stoppers, 0);
}

// ---- what is asked, and how far it is ------------------------------------------------------------

static void arm(bool on)
{
	if (on && !atomic_load_explicit(&sampling->armed, memory_order_relaxed))
		SET(armed_ns, now_ns());
	atomic_store_explicit(&sampling->armed, on ? ARMED : 0, memory_order_release);
}

// By our own thread.
static void stand_by(void)
{
	arm(false);
	sampling_rest();
}

struct work {
	uint64_t modules, next_full;
	uint64_t not_before; // of looks: how long the last ones took decides
	uint64_t looks_ns;   // processor time of those since all was read
	bool all_was_read;
	unsigned full_looks, hooks, found, scan_hooks;
	bool beating, unfinished, by_slots, scanned;
	enum inject_reason reason;
	uint64_t yields_at_ns, yielded_ns; // last seen that somebody else traces; 0: nobody did
};

static uint64_t thread_cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// Until all was read once, nothing of a program is seen whose calls lead through the rest.
static bool is_first_look(const struct work *w)
{
	return !w->all_was_read && w->looks_ns < FIRST_LOOKS_NS;
}

static bool looks_hurry(const struct work *w)
{
	return w->unfinished && is_first_look(w);
}

// Look for device libraries and for the words through which they are called: in new modules when there
// are any, and in all a few times later, the sooner the younger they are, because words are filled at the first
// call through them: a program that was just started has not called yet.
static void look(struct work *w, uint32_t request, uint64_t now)
{
	if (now < w->not_before)
		return;
	uint64_t modules = modules_generation(), began = thread_cpu_ns();
	bool full = now >= w->next_full && !w->unfinished;
	if (modules == w->modules && !full && !w->unfinished)
		return;
	enum inject_reason reason = INJECT_NO_LIBRARY;
	if (request & (INJECT_EVENTS | INJECT_WINDOWS))
		reason = cuda_begin();
	if ((request & INJECT_OPENCL) && opencl_begin() && reason == INJECT_NO_LIBRARY)
		reason = INJECT_OK;
	unsigned hooks = 0;
	bool unfinished = false;
	if (reason == INJECT_OK) {
		words_begin_look(is_first_look(w));
		hooks = cuda_hook(true, !full) + opencl_hook(true, !full);
		unfinished = words_end_look();
	}
	if (modules != w->modules && reason == INJECT_OK)
		w->full_looks = 0;
	if (full || modules != w->modules)
		w->next_full =
			now + (w->full_looks < 8 ? LOOK_NS / 8 << w->full_looks : FULL_LOOK_NS);
	w->full_looks++;
	w->modules = modules;
	// Those that the rest of a look has yet to find are there still.
	w->found = full ? hooks : w->found + hooks;
	w->hooks = unfinished && w->found < w->hooks ? w->hooks : w->found;
	w->scan_hooks = w->hooks;
	w->unfinished = unfinished;
	w->reason = w->hooks || reason != INJECT_OK ? reason : INJECT_NO_HOOK;
	w->looks_ns += thread_cpu_ns() - began;
	w->all_was_read = w->all_was_read || !unfinished;
	w->not_before = looks_hurry(w) ? now : now + LOOKS_SHARE * w->looks_ns;
	w->looks_ns = unfinished && looks_hurry(w) ? w->looks_ns : 0;
	SET(hooks, w->hooks);
	SET(reason, w->reason);
}

// The same where the agent finds the words: no data of the program is read.
static void take_slots(struct work *w, uint32_t request, uint64_t now)
{
	bool has_new = __atomic_load_n(&shared.control->slots_seq, __ATOMIC_RELAXED) !=
		       shared.state->slots_done;
	if (now < w->not_before)
		return;
	uint64_t modules = modules_generation(), began = thread_cpu_ns();
	if (modules == w->modules && w->by_slots && !has_new)
		return;
	enum inject_reason reason = INJECT_NO_LIBRARY;
	if (request & (INJECT_EVENTS | INJECT_WINDOWS))
		reason = cuda_begin();
	if ((request & INJECT_OPENCL) && opencl_begin() && reason == INJECT_NO_LIBRARY)
		reason = INJECT_OK;
	const struct hooks *const lists[MOST_LISTS] = {cuda_hooks(), opencl_hooks()};
	if (modules != w->modules || !w->by_slots)
		slots_look_again();
	slots_publish(lists);
	if (has_new && reason == INJECT_OK)
		slots_take(lists);
	w->by_slots = true;
	w->modules = modules;
	SET(modules, modules);
	w->hooks = slots_placed() + (w->scanned ? w->scan_hooks : opencl_by_loader());
	bool is_known = shared.state->slots_done; // until then nothing is refused
	w->reason = w->hooks || reason != INJECT_OK || !is_known ? reason : INJECT_NO_HOOK;
	w->not_before = now + LOOKS_SHARE * (thread_cpu_ns() - began);
	SET(hooks, w->hooks);
	SET(reason, w->reason);
}

static void unhook(struct work *w)
{
	slots_put_back();
	if (!w->modules)
		return;
	if (w->scanned) {
		words_begin_look(true);
		cuda_hook(false, false);
		opencl_hook(false, false);
		words_end_look();
	}
	cuda_unhooked();
	SET(hooks, 0);
	SET(modules, 0);
	memset(w, 0, sizeof *w);
}

static enum inject_status turn(struct work *w, uint64_t now)
{
	const struct inject_control *c = shared.control;
	uint32_t request = __atomic_load_n(&c->request, __ATOMIC_ACQUIRE);
	uint64_t beat = __atomic_load_n(&c->heartbeat_ns, __ATOMIC_RELAXED);
	if (c->off == INJECT_KILL) {
		stand_by();
		unhook(w);
		return INJECT_KILLED;
	}
	if (request == INJECT_LEAVE) {
		stand_by();
		unhook(w);
		return INJECT_LEFT;
	}
	w->beating = beat + INJECT_IDLE_NS > now && beat <= now + INJECT_AHEAD_NS;
	if (!w->beating || !(request & (INJECT_EVENTS | INJECT_OPENCL | INJECT_WINDOWS))) {
		stand_by();
		return INJECT_IDLE;
	}
	if (request & INJECT_SLOTS) {
		take_slots(w, request, now);
	} else {
		if (w->by_slots)
			w->by_slots = false, w->modules = 0, w->next_full = 0;
		w->scanned = true;
		look(w, request, now);
	}
	if (!w->hooks) {
		stand_by();
		return w->reason == INJECT_NO_LIBRARY || w->reason == INJECT_OK ? INJECT_WAITING :
										  INJECT_REFUSED;
	}
	sampling_refill(now);
	if (cuda_yields()) {
		stand_by();
		w->yielded_ns += w->yields_at_ns ? now - w->yields_at_ns : 0;
		w->yields_at_ns = now;
		SET(yielded_ms, (uint32_t)(w->yielded_ns / 1000000u));
		return INJECT_YIELDED;
	}
	w->yields_at_ns = 0;
	arm(request & (INJECT_EVENTS | INJECT_OPENCL));
	return INJECT_TIMING;
}

static void nap(uint64_t ns)
{
	struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
	clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

static void watch_forks(void);

// setuid() and its like wait until every thread has answered the C library's own signal (SIGSETXID). It
// may be blocked in the thread that loaded us, and pthread_sigmask() leaves it as it is.
static void hear_changes_of_user(void)
{
	uint64_t setxid = 1ull << (33 - 1);
	syscall(SYS_rt_sigprocmask, SIG_UNBLOCK, &setxid, NULL, sizeof setxid);
}

// Whether every thread of the program has ended: main() may call pthread_exit(), and the C library ends the
// process with its last thread, which must not be ours. The first one stays, a zombie, for as long.
static bool program_is_over(void)
{
	struct stat tasks; // a link each, and two
	if (syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/task", &tasks, 0) || tasks.st_nlink > 4)
		return false;
	char text[256];
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/stat", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	long got = syscall(SYS_read, fd, text, sizeof text - 1);
	syscall(SYS_close, fd);
	text[got > 0 ? got : 0] = 0;
	const char *name_end = strrchr(text, ')');
	return name_end && !strncmp(name_end, ") Z", 3);
}

static void *serve(void *unused)
{
	struct work work = {0};
	(void)unused;
	hear_changes_of_user();
	prctl(PR_SET_NAME, "sonde");
	watch_forks();
	uint64_t asked_ns = 0;
	for (bool last = false; !last;) {
		uint64_t now = now_ns();
		last = atomic_load(&exiting);
		if (now - asked_ns >= IDLE_TURN_NS) {
			asked_ns = now;
			last = last || program_is_over();
		}
		enum inject_status status = last ? INJECT_LEFT : turn(&work, now);
		SET(status, status);
		SET(beat_ns, now);
		if (status == INJECT_TIMING || cuda_pending())
			cuda_turn();
		opencl_turn();
		bool pending = cuda_pending() || opencl_pending();
		SET(launches, atomic_load(&sampling->seen));
		SET(self_ns, thread_cpu_ns());
		if (status == INJECT_KILLED && !pending)
			break;
		if (!last)
			nap(looks_hurry(&work) ? BETWEEN_FIRST_NS :
			    pending	       ? TURN_NS :
			    work.beating       ? QUIET_NS :
						 IDLE_TURN_NS);
	}
	atomic_store(&last_turn_is_over, true);
	return NULL;
}

// ---- beginning -----------------------------------------------------------------------------------

static bool start_thread(void)
{
	sigset_t all, before;
	pthread_attr_t attributes;
	pthread_t thread;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, 256 << 10);
	int failed = pthread_create(&thread, &attributes, serve, NULL);
	pthread_attr_destroy(&attributes);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return !failed;
}

static uint32_t number(const char **text)
{ // not strtoul, whose name newer C libraries change
	uint32_t n = 0;
	for (; *text && **text >= '0' && **text <= '9'; ++*text)
		n = n * 10 + (uint32_t)(**text - '0');
	return n;
}

// SONDE_INJECT=REQUEST:PER_SECOND, for a program that is started by Sonde: begin with that, before the
// agent has found us, as if it had just beaten.
static void begin_as_told(void)
{
	const char *word = getenv("SONDE_INJECT");
	uint32_t request = number(&word);
	if (!request || *word++ != ':')
		return;
	struct inject_control *c = shared.control;
	c->per_second = number(&word);
	c->request = request & (INJECT_EVENTS | INJECT_OPENCL | INJECT_STACKS);
	c->heartbeat_ns = now_ns() + INJECT_AHEAD_NS;
}

static void begin(void)
{
	if (!sampling_create() || !shared_create(++generation))
		return;
	begin_as_told();
	if (!start_thread())
		shared_forget();
}

static void before_fork(void)
{ // bounded: a loader that waits for this very fork must not wait for ever
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
	forget_steps();
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
static void watch_forks(void)
{
	static bool watched; // a forked child inherits the list, and this word with it
	if (!watched) {
		watched = true;
		__register_atfork(before_fork, after_fork_in_parent, after_fork_in_child,
				  &__dso_handle);
	}
}

// In a forked child, at its first launch: memory and a thread of its own.
void start_again_after_fork(void)
{
	if (atomic_exchange(&again_lock, 1))
		return;
	atomic_store(&sampling->armed, 0);
	shared_forget();
	sampling_forget();
	cuda_forget();
	opencl_forget();
	begin();
	atomic_store(&again_lock, 0);
}

// The process exits: what happened already is read, then our thread stays out of device libraries, whose
// own handlers come next.
static void at_exit(void)
{
	arm(false);
	if (!shared.header || shared.header->pid != (uint32_t)getpid())
		return; // a child, without our thread
	atomic_store(&exiting, true);
	bool pending = cuda_pending() || opencl_pending();
	uint64_t until = now_ns() + LAST_TURN_NS;
	for (int i = 0; pending && !atomic_load(&last_turn_is_over) && now_ns() < until; i++)
		short_nap(i);
	atomic_store(&closed, true);
	wait_for_step();
}

// Handlers run in the reverse order of being asked for, and device libraries ask for theirs when they are
// first used.
void watch_exit(void)
{
	static _Atomic bool watched; // a forked child inherits the handler, and this word with it
	if (!atomic_load_explicit(&watched, memory_order_relaxed) &&
	    !atomic_exchange(&watched, true))
		atexit(at_exit);
}

__attribute__((constructor)) static void loaded(void)
{
	if (!gnu_get_libc_version || !__register_atfork)
		return; // proved with glibc alone
	const char *word = getenv("SONDE_INJECT");
	if ((word && !strcmp(word, "off")) || other_copy_is_here())
		return;
	begin();
	atexit(at_exit);
}

// CUDA_INJECTION64_PATH: the driver calls this after loading. Nothing is left to do.
__attribute__((visibility("default"))) int InitializeInjection(void)
{
	return 1;
}
