// SPDX-License-Identifier: Apache-2.0
// A program in the worst state to be attached to, which checks itself and prints at the end whether
// anything was disturbed.
//
//   storm malloc|dlopen|fork|users|all|trap SECONDS [TURNS,TURNS,TURNS]
//
// With TURNS the three threads end after as many turns each. The checksums of what they did are those
// of every run with as many.
//
// Three threads storm; each now and then sleeps a millisecond, so that the injector may also catch
// *them*, right between two allocations, loads or forks. A fourth, the keeper, sits in raw system
// calls with known values in every register, in the extended state and in the red zone.
// One line of JSON at the end; exit 0 only if nothing was out of place.
//
// "users": one thread changes its group, which in the C library every thread has to answer by a signal
// before the call ends; two make threads, which takes the lock that the call holds meanwhile. The
// signal cuts sleeps short, so no time is checked and there is no keeper.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static atomic_bool over;
static atomic_long mallocs, loads, forks, keeps, bad_heap, bad_load, bad_child, bad_keep, bad_eintr,
	bad_time, bad_errno, bad_user;
static const char *mode;
static bool changes_users;
static struct work {
	unsigned long turns, most;
	uint64_t sum;
} works[3];
static atomic_int finished;
static _Thread_local struct work *own;
pthread_mutex_t trap_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void mix(uint64_t value)
{
	own->sum = (own->sum ^ (value + 1)) * 0x100000001b3;
}

static void rest(unsigned *seed)
{
	errno = 4711;
	uint64_t t = now_ns();
	if (rand_r(seed) & 1) {
		if (poll(NULL, 0, 1) != 0)
			bad_eintr++;
	} else {
		struct timespec ts = {0, 1000000};
		if (nanosleep(&ts, NULL))
			bad_eintr++;
	}
	if (now_ns() - t < 1000000)
		bad_time++;
	if (errno != 4711)
		bad_errno++;
}

static void malloc_some(unsigned *seed)
{
	enum { SLOTS = 64 };
	static _Thread_local struct {
		uint8_t *at;
		size_t n;
		uint8_t fill;
	} slot[SLOTS];
	for (int i = 0; i < 400; i++) {
		int k = rand_r(seed) % SLOTS;
		if (slot[k].at) {
			for (size_t j = 0; j < slot[k].n; j += 61)
				if (slot[k].at[j] != slot[k].fill) {
					bad_heap++;
					break;
				}
			mix((uint64_t)slot[k].n << 16 | slot[k].at[0] << 8 |
			    slot[k].at[slot[k].n - 1]);
			free(slot[k].at);
			slot[k].at = NULL;
		} else {
			slot[k].n = 1 + rand_r(seed) % (rand_r(seed) % 50 ? 3000 : 300000);
			slot[k].fill = rand_r(seed);
			slot[k].at = malloc(slot[k].n);
			memset(slot[k].at, slot[k].fill, slot[k].n);
		}
		mallocs++;
	}
}

static bool load_one(unsigned *seed)
{
	static const char *names[] = {"libm.so.6", "libresolv.so.2", "libutil.so.1",
				      "libnss_files.so.2", "libanl.so.1"};
	void *h = dlopen(names[rand_r(seed) % 5], RTLD_NOW | RTLD_LOCAL);
	if (!h || !dlsym(RTLD_DEFAULT, "poll"))
		return false;
	return dlclose(h) == 0;
}

static void load_some(unsigned *seed)
{
	for (int i = 0; i < 10; i++) {
		bool loaded = load_one(seed);
		mix(loaded << 1 | (*seed & 1));
		if (!loaded)
			bad_load++;
		loads++;
	}
}

static void fork_some(unsigned *seed)
{
	pid_t c = fork();
	if (c == 0) {
		alarm(20); // a child left with a locked loader or heap would hang here
		for (int i = 0; i < 50; i++)
			free(malloc(1 + rand_r(seed) % 5000));
		// Where other threads of the storm load libraries too, a load in the child is the program's own
		// fault: glibc does not make fork wait for the loader.
		_exit(!strcmp(mode, "all") || load_one(seed) ? 7 : 8);
	}
	int st;
	if (c < 0 || waitpid(c, &st, 0) != c || !WIFEXITED(st) || WEXITSTATUS(st) != 7)
		bad_child++;
	mix((uint64_t)st);
	forks++;
}

static void *answer(void *arg)
{
	return arg;
}

static void change_users(unsigned *seed)
{
	for (int i = 0; i < 20; i++) {
		gid_t group = 100 + (gid_t)(rand_r(seed) % 50);
		bool changed = !setegid(group) && getegid() == group && !setegid(0);
		bad_user += !changed;
		mix(changed);
	}
	usleep(1000);
}

static void make_threads(unsigned *seed)
{
	for (int i = 0; i < 20; i++) {
		void *sent = (void *)(uintptr_t)rand_r(seed), *back = NULL;
		pthread_t thread;
		if (pthread_create(&thread, NULL, answer, sent) || pthread_join(thread, &back))
			abort();
		mix(back == sent);
	}
	usleep(1000);
}

static void *storm(void *arg)
{
	unsigned seed = 1 + (unsigned)(uintptr_t)arg;
	own = &works[(uintptr_t)arg];
	for (unsigned turn = seed; own->most ? own->turns < own->most : !over; turn++) {
		bool all = !strcmp(mode, "all");
		if (changes_users) {
			own == works ? change_users(&seed) : make_threads(&seed);
			own->turns++;
			continue;
		}
		if (!strcmp(mode, "malloc") || (all && turn % 3 == 0))
			malloc_some(&seed);
		else if (!strcmp(mode, "dlopen") || (all && turn % 3 == 1))
			load_some(&seed);
		else if (!strcmp(mode, "fork") || all)
			fork_some(&seed);
		rest(&seed);
		own->turns++;
	}
	finished++;
	return NULL;
}

// One system call from a leaf that keeps data in its red zone; 0 if all came back as it was.
__attribute__((noinline)) static int keep(long nr, long a, long b, long c, long d, long *result)
{
	struct {
		uint64_t regs[8], ymm[4], after[8];
	} k = {.ymm = {0x1111222233334444, 0x5555666677778888, 0x9999aaaabbbbcccc,
		       0xddddeeeeffff0000}};
	register long r10 __asm__("r10") = d;
	__asm__ volatile("push %%rbp\n\t"
			 "vmovdqu 64(%%rbx), %%ymm3\n\t"
			 "vmovdqu 64(%%rbx), %%ymm15\n\t"
			 "mov $0x1234567812345678, %%r12\n\t"
			 "mov $0x2345678923456789, %%r13\n\t"
			 "mov $0x3456789a3456789a, %%r14\n\t"
			 "mov $0x456789ab456789ab, %%r15\n\t"
			 "mov %%r12, -8(%%rsp)\n\t"
			 "mov %%r13, -64(%%rsp)\n\t"
			 "mov %%r14, -128(%%rsp)\n\t"
			 "mov %%r15, %%rbp\n\t"
			 "syscall\n\t"
			 "mov -8(%%rsp), %%r9\n\t"
			 "xor %%r12, %%r9\n\t"
			 "mov -64(%%rsp), %%r8\n\t"
			 "xor %%r13, %%r8\n\t"
			 "or %%r8, %%r9\n\t"
			 "mov -128(%%rsp), %%r8\n\t"
			 "xor %%r14, %%r8\n\t"
			 "or %%r8, %%r9\n\t"
			 "mov %%r9, 40(%%rbx)\n\t"
			 "vmovdqu %%ymm3, 96(%%rbx)\n\t"
			 "vmovdqu %%ymm15, 128(%%rbx)\n\t"
			 "mov %%r12, (%%rbx)\n\t"
			 "mov %%r13, 8(%%rbx)\n\t"
			 "mov %%r14, 16(%%rbx)\n\t"
			 "mov %%r15, 24(%%rbx)\n\t"
			 "mov %%rbp, 32(%%rbx)\n\t"
			 "pop %%rbp\n\t"
			 : "=a"(*result)
			 : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "b"(&k)
			 : "rcx", "r8", "r9", "r11", "r12", "r13", "r14", "r15", "xmm3", "xmm15",
			   "memory", "cc");
	return k.regs[5] || k.regs[0] != 0x1234567812345678 || k.regs[1] != 0x2345678923456789 ||
	       k.regs[2] != 0x3456789a3456789a || k.regs[3] != 0x456789ab456789ab ||
	       k.regs[4] != k.regs[3] || memcmp(k.after, k.ymm, 32) ||
	       memcmp(k.after + 4, k.ymm, 32);
}

static void *keeper(void *arg)
{
	(void)arg;
	int ep = epoll_create1(0), fds[2];
	if (pipe(fds))
		abort();
	for (unsigned i = 0; !over; i++) {
		struct timespec ts = {0, 3000000};
		struct epoll_event ev;
		struct pollfd p = {fds[0], POLLIN, 0};
		long r = 0;
		uint64_t t = now_ns();
		int bad = 0;
		switch (i % 4) {
		case 0:
			bad = keep(SYS_nanosleep, (long)&ts, 0, 0, 0, &r);
			break;
		case 1:
			bad = keep(SYS_poll, (long)&p, 1, 3, 0, &r);
			break;
		case 2:
			bad = keep(SYS_ppoll, (long)&p, 1, (long)&ts, 0, &r);
			break;
		case 3:
			bad = keep(SYS_epoll_wait, ep, (long)&ev, 1, 3, &r);
			break;
		}
		bad_keep += bad;
		if (r != 0)
			bad_eintr++;
		if (now_ns() - t < 2900000)
			bad_time++;
		keeps++;
	}
	return NULL;
}

// The trap: this thread sleeps in poll with a lock that the constructor of a library, loaded by another
// thread, waits for. A dlopen borrowed here can never finish: the loader's lock is never free.
static void *trapped(void *arg)
{
	pthread_mutex_lock(&trap_lock);
	*(atomic_int *)arg = 1;
	struct timespec ts = {2, 0};
	if (nanosleep(&ts, NULL))
		bad_eintr++;
	pthread_mutex_unlock(&trap_lock);
	return NULL;
}

static void *loads_locked(void *arg)
{
	void *h = dlopen(arg, RTLD_NOW);
	if (!h)
		bad_load++;
	loads++;
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	mode = argv[1];
	changes_users = !strcmp(mode, "users");
	if (argc > 3)
		sscanf(argv[3], "%lu,%lu,%lu", &works[0].most, &works[1].most, &works[2].most);
	signal(SIGALRM, SIG_DFL);
	pthread_t t[4];
	if (!strcmp(mode, "trap")) {
		atomic_int held = 0;
		pthread_create(&t[0], NULL, trapped, &held);
		while (!held)
			sched_yield();
		pthread_create(&t[1], NULL, loads_locked, argv[3]);
		pthread_join(t[0], NULL);
		pthread_join(t[1], NULL);
	} else {
		for (long i = 0; i < 3; i++)
			pthread_create(&t[i], NULL, storm, (void *)i);
		pthread_create(&t[3], NULL, changes_users ? answer : keeper, NULL);
		uint64_t end = now_ns() + (uint64_t)(atof(argv[2]) * 1e9);
		char stop;
		// Until the time is over, standard input closes or the threads have done their turns.
		while (now_ns() < end && finished < 3) {
			struct pollfd p = {0, POLLIN, 0};
			int r = poll(&p, 1, 20);
			if (r < 0 && !changes_users)
				bad_eintr++;
			if (r > 0 && read(0, &stop, 1) == 0)
				break;
		}
		over = true;
		for (int i = 0; i < 4; i++)
			pthread_join(t[i], NULL);
	}
	long bad = bad_heap + bad_load + bad_child + bad_keep + bad_eintr + bad_time + bad_errno +
		   bad_user;
	printf("{\"mode\":\"%s\",\"mallocs\":%ld,\"loads\":%ld,\"forks\":%ld,\"keeps\":%ld,\"bad_"
	       "heap\":%ld,\"bad_load\":%ld,"
	       "\"bad_child\":%ld,\"bad_state\":%ld,\"bad_eintr\":%ld,\"bad_time\":%ld,\"bad_"
	       "errno\":%ld,\"bad_user\":%ld,\"turns\":\"%lu,%lu,%lu\",\"sums\":\"%016lx %016lx "
	       "%016lx\"}\n",
	       mode, mallocs, loads, forks, keeps, bad_heap, bad_load, bad_child, bad_keep,
	       bad_eintr, bad_time, bad_errno, bad_user, works[0].turns, works[1].turns,
	       works[2].turns, works[0].sum, works[1].sum, works[2].sum);
	return bad ? 1 : 0;
}
