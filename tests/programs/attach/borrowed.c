// SPDX-License-Identifier: Apache-2.0
// A program of which one thread waits to be borrowed, with known values in all that it has, and
// that stands still in the middle of the load until a line lets it go on. So a test can do at a
// known point what otherwise would have to meet it by chance.
//
//   borrowed recv|timed|poll|partial|flip
//
// The thread waits in recv(); in one with a timeout, which answers EINTR to a stop; in poll(); in
// recv(MSG_WAITALL), of which half has come; by turns in a
// nanosleep() and a futex, so short that it is often met in the other one than it was seen in.
// Prints "ready TID ADDRESS…": of functions which the test names in place of others. hook() and mark()
// stand for dlopen, slow_lock() for the C library's lock of open files.
// Then does what it reads, a letter (and a path) a line:
//
//   f   hook(): wait in a futex of the program's own, until "w"
//   g   slow_lock(): take the lock
//   d   hook(): spoil every register that a function may, then dlopen() and return
//   a   load the library PATH in another thread (holding.c), whose constructor waits
//   l   that constructor: take the lock of open files for a moment, then return
//   r   that constructor: return
//   s   the thread: end its wait, and print what became of it
//   b   the thread: end its wait, call dlopen() from below on its stack, then wait as before
//   B   the same from further below than a load reaches, with every signal blocked
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int wait_fd[2], hook_fd[2], holder_fd[2], orders;
static const char *mode;
static atomic_uint word, marked, in_futex, borrowed_in_futex;
static char holding[4096], deep[4096];
static void (*list_lock)(void);

static void say(const char *format, ...)
{
	char line[256];
	va_list list;
	va_start(list, format);
	int length = vsnprintf(line, sizeof line, format, list);
	va_end(list);
	if (write(1, line, (size_t)length) != length) // no stdio: nothing that takes a lock
		_exit(3);
}

static char next(int fd)
{
	char c;
	if (read(fd, &c, 1) != 1)
		_exit(4);
	return c;
}

static uint64_t signal_mask(void)
{
	uint64_t mask = 0;
	syscall(SYS_rt_sigprocmask, SIG_BLOCK, NULL, &mask,
		sizeof mask); // the C library hides some
	return mask;
}

// ---- what runs on the borrowed thread in the middle of the load ----

static void spoil(void)
{
	__asm__ volatile("vpcmpeqd %%ymm0, %%ymm0, %%ymm0\n\t"
			 "vmovdqa %%ymm0, %%ymm1\n\tvmovdqa %%ymm0, %%ymm2\n\t"
			 "vmovdqa %%ymm0, %%ymm3\n\tvmovdqa %%ymm0, %%ymm15\n\t" ::
				 : "xmm0", "xmm1", "xmm2", "xmm3", "xmm15");
}

__attribute__((visibility("default"))) void *hook(const char *path, int flags)
{
	say("inside %016lx\n", signal_mask());
	for (;;) {
		switch (next(hook_fd[0])) {
		case 'f':
			while (word == 0)
				syscall(SYS_futex, &word, FUTEX_WAIT, 0, NULL, NULL, 0);
			say("woken\n");
			break;
		case 'd':
			spoil();
			return dlopen(path, flags);
		}
	}
}

__attribute__((visibility("default"))) void slow_lock(void)
{
	say("locks\n");
	while (next(hook_fd[0]) != 'g')
		;
	list_lock();
}

// In place of dlopen: only notes in which call the thread was.
__attribute__((visibility("default"))) void *mark(const char *path, int flags)
{
	(void)path, (void)flags;
	borrowed_in_futex += in_futex;
	marked++;
	return NULL;
}

// ---- another thread, inside the loader ----

__attribute__((visibility("default"))) void in_constructor(void)
{
	say("constructor\n");
	if (next(holder_fd[0]) == 'l')
		fflush(NULL);
}

static void *holder(void *arg)
{
	(void)arg;
	while (next(holder_fd[0]) != 'a')
		;
	say(dlopen(holding, RTLD_NOW) ? "loaded\n" : "not loaded\n");
	return NULL;
}

// ---- the thread that is borrowed ----

// One system call from a leaf that keeps data in its registers and its red zone; 0: all as it was.
__attribute__((noinline)) static int keep(long nr, long a, long b, long c, long d, long *result)
{
	struct {
		uint64_t regs[8], ymm[4], after[12];
	} k = {.ymm = {0x1111222233334444, 0x5555666677778888, 0x9999aaaabbbbcccc,
		       0xddddeeeeffff0000}};
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = 0;
	register long r9 __asm__("r9") = 0;
	__asm__ volatile("push %%rbp\n\t"
			 "vmovdqu 64(%%rbx), %%ymm0\n\t"
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
			 "vmovdqu %%ymm0, 96(%%rbx)\n\t"
			 "vmovdqu %%ymm3, 128(%%rbx)\n\t"
			 "vmovdqu %%ymm15, 160(%%rbx)\n\t"
			 "mov %%r12, (%%rbx)\n\t"
			 "mov %%r13, 8(%%rbx)\n\t"
			 "mov %%r14, 16(%%rbx)\n\t"
			 "mov %%r15, 24(%%rbx)\n\t"
			 "mov %%rbp, 32(%%rbx)\n\t"
			 "pop %%rbp\n\t"
			 : "=a"(*result), "+r"(r8), "+r"(r9)
			 : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "b"(&k)
			 : "rcx", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm3", "xmm15",
			   "memory", "cc");
	return k.regs[5] || k.regs[0] != 0x1234567812345678 || k.regs[1] != 0x2345678923456789 ||
	       k.regs[2] != 0x3456789a3456789a || k.regs[3] != 0x456789ab456789ab ||
	       k.regs[4] != k.regs[3] || memcmp(k.after, k.ymm, 32) ||
	       memcmp(k.after + 4, k.ymm, 32) || memcmp(k.after + 8, k.ymm, 32);
}

static long wait_once(char *to, int *spoilt)
{
	struct pollfd p = {wait_fd[0], POLLIN, 0};
	long r = 0;
	if (!strcmp(mode, "poll"))
		*spoilt |= keep(SYS_poll, (long)&p, 1, -1, 0, &r);
	else if (!strcmp(mode, "partial"))
		*spoilt |= keep(SYS_recvfrom, wait_fd[0], (long)to, 2, MSG_WAITALL, &r);
	else
		*spoilt |= keep(SYS_recvfrom, wait_fd[0], (long)to, 1, 0, &r);
	return r;
}

__attribute__((noinline)) static void load_from_below(size_t depth)
{
	volatile char *far = __builtin_alloca(depth);
	far[0] = 1;
	say(dlopen(deep, RTLD_NOW) ? "loaded below\n" : "not loaded below\n");
	far[depth - 1] = far[0];
}

// With every signal blocked, as in the load.
static void load_from_far_below(void)
{
	uint64_t all = UINT64_MAX, before;
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof all);
	load_from_below(512 * 1024);
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof before);
}

static void *waits(void *arg)
{
	static char other_stack[64 * 1024];
	stack_t alternate = {.ss_sp = other_stack, .ss_size = sizeof other_stack}, now;
	sigset_t one;
	sigemptyset(&one);
	sigaddset(&one, SIGUSR1);
	pthread_sigmask(SIG_BLOCK, &one, NULL);
	sigaltstack(&alternate, NULL);
	uint64_t mask = signal_mask();
	*(atomic_int *)arg = gettid();
	for (;;) {
		char got[2] = {0};
		int spoilt = 0;
		long result = wait_once(got, &spoilt);
		if (got[0] == 'b' || got[0] == 'B') {
			got[0] == 'b' ? load_from_below(128 * 1024) : load_from_far_below();
			continue;
		}
		sigaltstack(NULL, &now);
		spoilt |= signal_mask() != mask || now.ss_sp != other_stack || now.ss_flags;
		say("answered %ld spoilt %d\n", result, spoilt);
	}
	return NULL;
}

static void *flips(void *arg)
{
	const struct timespec brief = {0, 20000};
	*(atomic_int *)arg = gettid();
	for (;;) {
		// As many arguments as the futex has, so that the stack pointer is the same.
		syscall(SYS_nanosleep, &brief, NULL, 0, 0, 0, 0);
		in_futex = 1;
		syscall(SYS_futex, &word, FUTEX_WAIT, 0, &brief, NULL, 0);
		in_futex = 0;
	}
	return NULL;
}

// Without stdio: fflush(NULL) waits for a stream that somebody reads.
static int read_line(char *to, size_t most)
{
	size_t length = 0;
	while (length < most - 1 && read(orders, to + length, 1) == 1 && to[length] != '\n')
		length++;
	to[length] = 0;
	return length > 0;
}

static void send_to(int fd, const char *what, size_t count)
{
	if (write(fd, what, count) != (ssize_t)count)
		_exit(5);
}

int main(int argc, char **argv)
{
	pthread_t thread;
	atomic_int tid = 0;
	char line[4200];
	mode = argc > 1 ? argv[1] : "recv";
	*(void **)&list_lock = dlsym(RTLD_DEFAULT, "_IO_list_lock");
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, wait_fd) || pipe(hook_fd) || pipe(holder_fd))
		return 1;
	orders = dup(0);
	close(0); // so that a memfd is number 0, which is as good as any
	const struct timeval timeout = {600, 0};
	if (!strcmp(mode, "timed") &&
	    setsockopt(wait_fd[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout))
		return 1;
	if (!strcmp(mode, "partial"))
		send_to(wait_fd[1], "s", 1);
	pthread_create(&thread, NULL, holder, NULL);
	pthread_create(&thread, NULL, strcmp(mode, "flip") ? waits : flips, &tid);
	while (!tid)
		sched_yield();
	say("ready %d %lu %lu %lu\n", tid, (unsigned long)hook, (unsigned long)mark,
	    (unsigned long)slow_lock);
	while (read_line(line, sizeof line)) {
		switch (line[0]) {
		case 'f':
		case 'd':
		case 'g':
			send_to(hook_fd[1], line, 1);
			break;
		case 'w':
			word = 1;
			syscall(SYS_futex, &word, FUTEX_WAKE, 1, NULL, NULL, 0);
			break;
		case 'a':
			strcpy(holding, line + 2);
			send_to(holder_fd[1], line, 1);
			break;
		case 'l':
		case 'r':
			send_to(holder_fd[1], line, 1);
			break;
		case 'b':
		case 'B':
			strcpy(deep, line + 2);
			send_to(wait_fd[1], line, 1);
			break;
		case 's':
			send_to(wait_fd[1], line, 1);
			break;
		}
	}
	say("marked %u in futex %u\n", marked, borrowed_in_futex);
	_exit(0); // the thread waits for ever
}
