// SPDX-License-Identifier: Apache-2.0
// The library's one thread: follows the agent's request, puts hooks in and out, polls the backends.
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* How long the thread sleeps between two polls: while timed launches are pending, while an agent's heartbeat comes,
 * otherwise. */
#define POLL_NS 5000000u
#define QUIET_NS 20000000u
#define IDLE_POLL_NS 250000000u
/* Full scans come 1/8 s, 1/4 s, … after modules were loaded, and every 60 s in the end. */
#define SCAN_NS 1000000000ull
#define FULL_SCAN_NS 60000000000ull
#define SCANS_SHARE 50u		     /* scans take 1/50 of a processor's time; */
#define FIRST_SCANS_NS 4000000000ull /* but the first ones this much: a framework needs 2 s */
#define BETWEEN_FIRST_NS 1000000u    /* sleep between those first scans */
#define LAST_POLL_NS 50000000ull     /* longest wait for the last poll at exit */

static _Atomic uint64_t correlations;
static _Atomic bool exiting, last_poll_is_over;

uint64_t next_correlation(void)
{
	return atomic_fetch_add_explicit(&correlations, 1, memory_order_relaxed) + 1;
}

void arm(bool on)
{
	if (on && !atomic_load_explicit(&sampling->armed, memory_order_relaxed))
		SET(armed_ns, now_ns());
	atomic_store_explicit(&sampling->armed, on ? ARMED : 0, memory_order_release);
}

// By our own thread.
static void disarm(void)
{
	arm(false);
	sampling_rest();
}

// What the thread remembers from poll to poll.
struct work {
	uint64_t modules;    // modules_generation at the last scan; 0: none
	uint64_t next_full;  // when the next full scan is due
	uint64_t not_before; // the earliest time of the next scan, by how long the last ones took
	uint64_t scans_ns;   // processor time of the first scans together; 0 after them
	bool all_was_read;   // a scan was finished
	unsigned full_scans; // scans since modules were loaded: sets when the next full one is due
	unsigned found;	     // slots that lead to us, found since the last full scan began
	unsigned hooks;	     // slots that lead to us
	unsigned scan_hooks; // those that a scan found, not the agent
	bool beating;	     // the agent's heartbeat comes
	bool unfinished;     // the last scan's budget ended before all was read
	bool by_slots;	     // slots come from the agent now
	bool scanned;	     // a scan has put hooks in
	enum inject_reason reason;
	uint64_t yields_at_ns; // when another tool was last seen tracing; 0: it does not now
	uint64_t yielded_ns;   // how long others traced, together
};

static uint64_t thread_cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// Until all was read once, there are slots without a hook, whose launches are not seen.
static bool is_first_scan(const struct work *w)
{
	return !w->all_was_read && w->scans_ns < FIRST_SCANS_NS;
}

static bool scan_is_urgent(const struct work *w)
{
	return w->unfinished && is_first_scan(w);
}

// Find device libraries and the slots through which they are called: in new modules when there are any,
// and in all a few times later, more often while they are young. Slots are filled at the first call through
// them, and a program that was just started has not called yet.
static void scan(struct work *w, uint32_t request, uint64_t now)
{
	if (now < w->not_before)
		return;
	uint64_t modules = modules_generation(), began = thread_cpu_ns();
	bool full = now >= w->next_full && !w->unfinished;
	if (modules == w->modules && !full && !w->unfinished)
		return;
	enum inject_reason reason = backends_begin(request);
	unsigned hooks = 0;
	bool unfinished = false;
	if (reason == INJECT_OK) {
		scan_begin(is_first_scan(w));
		hooks = backends_hook(true, !full);
		unfinished = scan_end();
	}
	if (modules != w->modules && reason == INJECT_OK)
		w->full_scans = 0;
	if (full || modules != w->modules)
		w->next_full =
			now + (w->full_scans < 8 ? SCAN_NS / 8 << w->full_scans : FULL_SCAN_NS);
	w->full_scans++;
	w->modules = modules;
	// While a scan is not finished, hooks that it has not come to are still in.
	w->found = full ? hooks : w->found + hooks;
	w->hooks = unfinished && w->found < w->hooks ? w->hooks : w->found;
	w->scan_hooks = w->hooks;
	w->unfinished = unfinished;
	w->reason = w->hooks || reason != INJECT_OK ? reason : INJECT_NO_HOOK;
	w->scans_ns += thread_cpu_ns() - began;
	w->all_was_read = w->all_was_read || !unfinished;
	w->not_before = scan_is_urgent(w) ? now : now + SCANS_SHARE * w->scans_ns;
	w->scans_ns = unfinished && scan_is_urgent(w) ? w->scans_ns : 0;
	SET(hooks, w->hooks);
	SET(reason, w->reason);
}

// The same where the agent finds the slots: no data of the program is read.
static void take_slots(struct work *w, uint32_t request, uint64_t now)
{
	bool has_new = __atomic_load_n(&shared.control->slots_seq, __ATOMIC_RELAXED) !=
		       shared.state->slots_done;
	if (now < w->not_before)
		return;
	uint64_t modules = modules_generation(), began = thread_cpu_ns();
	if (modules == w->modules && w->by_slots && !has_new)
		return;
	enum inject_reason reason = backends_begin(request);
	const struct hooks *lists[MOST_LISTS];
	backends_hooks(lists);
	if (modules != w->modules || !w->by_slots)
		slots_recheck();
	slots_publish(lists);
	if (has_new && reason == INJECT_OK)
		slots_take(lists);
	w->by_slots = true;
	w->modules = modules;
	SET(modules, modules);
	w->hooks = slots_placed() + (w->scanned ? w->scan_hooks : backends_by_loader());
	bool is_known = shared.state->slots_done; // the agent has sent a list: it may lack slots
	w->reason = w->hooks || reason != INJECT_OK || !is_known ? reason : INJECT_NO_HOOK;
	w->not_before = now + SCANS_SHARE * (thread_cpu_ns() - began);
	SET(hooks, w->hooks);
	SET(reason, w->reason);
}

static void unhook(struct work *w)
{
	slots_put_back();
	if (!w->modules)
		return;
	if (w->scanned) {
		scan_begin(true);
		backends_hook(false, false);
		scan_end();
	}
	backends_unhooked();
	SET(hooks, 0);
	SET(modules, 0);
	memset(w, 0, sizeof *w);
}

static enum inject_status poll_request(struct work *w, uint64_t now)
{
	const struct inject_control *c = shared.control;
	uint32_t request = __atomic_load_n(&c->request, __ATOMIC_ACQUIRE);
	if (c->off == INJECT_KILL || request == INJECT_LEAVE) {
		trace_end();
		if (trace_is_running()) { // the hooks stay until it has restored another profiler's callbacks
			disarm();
			return INJECT_WINDOW;
		}
		trace_poll(0, 0);
	}
	uint64_t heartbeat = __atomic_load_n(&c->heartbeat_ns, __ATOMIC_RELAXED);
	if (c->off == INJECT_KILL) {
		disarm();
		unhook(w);
		return INJECT_KILLED;
	}
	if (request == INJECT_LEAVE) {
		disarm();
		unhook(w);
		return INJECT_LEFT;
	}
	w->beating = heartbeat + INJECT_IDLE_NS > now && heartbeat <= now + INJECT_AHEAD_NS;
	if (!w->beating || !(request & (INJECT_EVENTS | INJECT_OPENCL | INJECT_WINDOWS))) {
		trace_end();
		if (!w->beating || !c->window) // else the agent has yet to read the trace
			trace_poll(0, 0);
		disarm();
		return INJECT_IDLE;
	}
	if (request & INJECT_SLOTS) {
		take_slots(w, request, now);
	} else {
		if (w->by_slots)
			w->by_slots = false, w->modules = 0, w->next_full = 0;
		w->scanned = true;
		scan(w, request, now);
	}
	if (!w->hooks) {
		disarm();
		return w->reason == INJECT_NO_LIBRARY || w->reason == INJECT_OK ? INJECT_WAITING :
										  INJECT_REFUSED;
	}
	sampling_refill(now);
	if (request & INJECT_WINDOWS)
		trace_poll(c->window, c->window_us);
	if (trace_is_running()) { // our events and gates would be in it
		disarm();
		return INJECT_WINDOW;
	}
	if (backends_yield()) {
		disarm();
		w->yielded_ns += w->yields_at_ns ? now - w->yields_at_ns : 0;
		w->yields_at_ns = now;
		SET(yielded_ms, (uint32_t)(w->yielded_ns / 1000000u));
		return INJECT_YIELDED;
	}
	w->yields_at_ns = 0;
	arm(request & (INJECT_EVENTS | INJECT_OPENCL));
	return INJECT_TIMING;
}

void nap(uint64_t ns)
{ // the C library's function is a cancellation point: it may unwind the program's thread out of fork()
	struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
	int before = errno;
	syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &t, NULL);
	errno = before;
}

// setuid() and its like wait until every thread has answered the C library's own signal (SIGSETXID). It
// may be blocked in the thread that loaded us, and pthread_sigmask() leaves it as it is.
static void unblock_setxid_signal(void)
{
	uint64_t setxid = 1ull << (33 - 1);
	syscall(SYS_rt_sigprocmask, SIG_UNBLOCK, &setxid, NULL, sizeof setxid);
}

// Whether every thread of the program has ended: main() may call pthread_exit(), and the C library ends the
// process with its last thread, which must not be ours. The first one stays, a zombie, for as long.
static bool program_is_over(void)
{
	struct stat tasks; // has two links more than threads: 4 for ours and the zombie
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
	unblock_setxid_signal();
	prctl(PR_SET_NAME, "sonde");
	watch_forks();
	uint64_t checked_ns = 0;
	for (bool last = false; !last;) {
		uint64_t now = now_ns();
		last = atomic_load(&exiting);
		if (now - checked_ns >= IDLE_POLL_NS) {
			checked_ns = now;
			last = last || program_is_over();
		}
		enum inject_status status = last ? INJECT_LEFT : poll_request(&work, now);
		SET(status, status);
		SET(polled_ns, now);
		backends_poll(status == INJECT_TIMING);
		bool pending = backends_pending();
		SET(launches, atomic_load(&sampling->seen));
		SET(self_ns, thread_cpu_ns());
		if (status == INJECT_KILLED && !pending)
			break;
		if (!last)
			nap(scan_is_urgent(&work) ? BETWEEN_FIRST_NS :
			    pending		  ? POLL_NS :
			    work.beating	  ? QUIET_NS :
						    IDLE_POLL_NS);
	}
	atomic_store(&last_poll_is_over, true);
	return NULL;
}

bool thread_start(void)
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

void thread_end(void)
{
	atomic_store(&exiting, true);
	bool pending = backends_pending();
	uint64_t until = now_ns() + LAST_POLL_NS;
	for (int i = 0; pending && !atomic_load(&last_poll_is_over) && now_ns() < until; i++)
		short_nap(i);
	steps_close();
}
