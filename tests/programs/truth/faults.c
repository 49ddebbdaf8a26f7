// SPDX-License-Identifier: Apache-2.0
// A thread whose page faults are answered late, by a thread that chooses when (userfaultfd): every
// fault blocks for 20 ms. Prints the truth as JSON: {"faulter": [tid, seconds], "pager": [tid, 0]}.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };

static int uffd;
static pid_t pager_tid;

static double now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void *pager(void *arg)
{
	static char page[PAGE] __attribute__((aligned(PAGE)));
	const struct timespec late = {0, 20000000};
	struct uffd_msg fault;

	pthread_setname_np(pthread_self(), "pager");
	pager_tid = syscall(SYS_gettid);
	while (read(uffd, &fault, sizeof(fault)) == sizeof(fault)) {
		struct uffdio_copy copy = {
			.dst = fault.arg.pagefault.address & ~(__u64)(PAGE - 1),
			.src = (unsigned long)page,
			.len = PAGE,
		};

		nanosleep(&late, NULL);
		if (ioctl(uffd, UFFDIO_COPY, &copy))
			exit(1);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	long pages = argc > 1 ? atol(argv[1]) : 50;
	struct uffdio_api api = {.api = UFFD_API};
	struct uffdio_register range = {.mode = UFFDIO_REGISTER_MODE_MISSING};
	double seconds = 0;
	pthread_t thread;
	volatile char *memory;

	uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
		      0);
	range.range.start = (unsigned long)memory;
	range.range.len = pages * PAGE;
	if (uffd < 0 || memory == MAP_FAILED || ioctl(uffd, UFFDIO_API, &api) ||
	    ioctl(uffd, UFFDIO_REGISTER, &range)) {
		perror("userfaultfd");
		return 77;
	}
	pthread_setname_np(pthread_self(), "faulter");
	pthread_create(&thread, NULL, pager, NULL);
	for (long i = 0; i < pages; i++) {
		double began = now_s();

		memory[i * PAGE] = 1;
		seconds += now_s() - began;
	}
	printf("{\"faulter\": [%d, %f], \"pager\": [%d, 0]}\n", getpid(), seconds, pager_tid);
	return 0;
}
