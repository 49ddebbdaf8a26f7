// SPDX-License-Identifier: Apache-2.0
// Of waits.c: the system calls that its threads wait in, and how a value comes to each.
#define _GNU_SOURCE
#include "waits.h"

#include <errno.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define TIMEOUT_MS 30
static const struct timespec timeout = {0, TIMEOUT_MS * 1000000};

void die(const char *what)
{
	perror(what);
	exit(2);
}

static int set_timeout(int fd, int option)
{
	struct timeval t = {0, TIMEOUT_MS * 1000};
	return setsockopt(fd, SOL_SOCKET, option, &t, sizeof t);
}

static void put(struct mode *m, long value)
{
	if (write(m->fd[1], &value, sizeof value) != sizeof value)
		die("feed");
}

static long took(long count, const long *value)
{
	return count == sizeof *value ? *value : -1;
}

// ---- sockets with timeouts ----

static int recv_begin(struct mode *m)
{
	return socketpair(AF_UNIX, SOCK_STREAM, 0, m->fd) || set_timeout(m->fd[0], SO_RCVTIMEO);
}

static long recv_wait(struct mode *m)
{
	long value;
	return took(recv(m->fd[0], &value, sizeof value, 0), &value);
}

static long read_wait(struct mode *m)
{
	long value;
	return took(read(m->fd[0], &value, sizeof value), &value);
}

static struct sockaddr_un address(struct mode *m)
{
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	snprintf(to.sun_path + 1, sizeof to.sun_path - 1, "waits-%d-%s", getpid(), m->name);
	return to;
}

static int listens(struct mode *m, int backlog)
{
	struct sockaddr_un to = address(m);
	m->fd[0] = socket(AF_UNIX, SOCK_STREAM, 0);
	return bind(m->fd[0], (void *)&to, sizeof to) || listen(m->fd[0], backlog);
}

static int accept_begin(struct mode *m)
{
	return listens(m, 4096) || set_timeout(m->fd[0], SO_RCVTIMEO);
}

static long accept_wait(struct mode *m)
{
	long value, count;
	int fd = accept(m->fd[0], NULL, NULL);
	if (fd < 0)
		return -1;
	count = read(fd, &value, sizeof value);
	close(fd);
	return took(count, &value);
}

static void accept_feed(struct mode *m, long value)
{
	struct sockaddr_un to = address(m);
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	if (connect(fd, (void *)&to, sizeof to) || write(fd, &value, sizeof value) != sizeof value)
		die("connect");
	close(fd);
}

static int send_begin(struct mode *m)
{
	static const char block[4096];
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, m->fd) || set_timeout(m->fd[0], SO_SNDTIMEO))
		return 1;
	while (send(m->fd[0], block, sizeof block, MSG_DONTWAIT) > 0)
		;
	return 0;
}

static long send_wait(struct mode *m)
{
	return send(m->fd[0], "x", 1, 0);
}

static int connect_begin(struct mode *m)
{
	struct sockaddr_un to = address(m);
	if (listens(m, 0))
		return 1;
	m->fd[1] = socket(AF_UNIX, SOCK_STREAM, 0);
	if (connect(m->fd[1], (void *)&to, sizeof to)) // fills the backlog
		return 1;
	m->fd[1] = socket(AF_UNIX, SOCK_STREAM, 0);
	return set_timeout(m->fd[1], SO_SNDTIMEO);
}

static long connect_wait(struct mode *m)
{
	struct sockaddr_un to = address(m);
	return connect(m->fd[1], (void *)&to, sizeof to);
}

// ---- signals (blocked everywhere) ----

static long sigwait_wait(struct mode *m)
{
	sigset_t set;
	siginfo_t info;
	(void)m;
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN);
	return sigtimedwait(&set, &info, &timeout) < 0 ? -1 : (long)info.si_value.sival_int;
}

static void sigwait_feed(struct mode *m, long value)
{
	(void)m;
	if (sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = (int)value}))
		die("sigqueue");
}

static int signalfd_begin(struct mode *m)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN + 1);
	m->fd[0] = signalfd(-1, &set, 0);
	return m->fd[0] < 0;
}

static long signalfd_wait(struct mode *m)
{
	struct signalfd_siginfo info;
	return read(m->fd[0], &info, sizeof info) == sizeof info ? (long)info.ssi_int : -1;
}

static void signalfd_feed(struct mode *m, long value)
{
	(void)m;
	if (sigqueue(getpid(), SIGRTMIN + 1, (union sigval){.sival_int = (int)value}))
		die("sigqueue");
}

// ---- descriptors ----

static int epoll_begin(struct mode *m)
{
	struct epoll_event event = {.events = EPOLLIN};
	m->word = epoll_create1(0);
	return pipe(m->fd) || epoll_ctl(m->word, EPOLL_CTL_ADD, m->fd[0], &event);
}

static long epoll_wait_(struct mode *m)
{
	struct epoll_event event;
	int n = epoll_wait(m->word, &event, 1, TIMEOUT_MS);
	if (n == 0)
		errno = EAGAIN;
	return n > 0 ? read_wait(m) : -1;
}

static int pipe_begin(struct mode *m)
{
	return pipe(m->fd);
}

static long poll_wait(struct mode *m)
{
	struct pollfd p = {m->fd[0], POLLIN, 0};
	int n = poll(&p, 1, TIMEOUT_MS);
	if (n == 0)
		errno = EAGAIN;
	return n > 0 ? read_wait(m) : -1;
}

static long select_wait(struct mode *m)
{
	fd_set set;
	struct timeval t = {0, TIMEOUT_MS * 1000};
	FD_ZERO(&set);
	FD_SET(m->fd[0], &set);
	int n = select(m->fd[0] + 1, &set, NULL, NULL, &t);
	if (n == 0)
		errno = EAGAIN;
	return n > 0 ? read_wait(m) : -1;
}

static long nanosleep_wait(struct mode *m)
{
	(void)m;
	if (!nanosleep(&timeout, NULL))
		errno = EAGAIN;
	return -1;
}

// A ring with one read of a pipe under way, waited for in io_uring_enter.
struct ring {
	int fd;
	unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
	long value;
	int under_way;
};

static int uring_begin(struct mode *m)
{
	struct io_uring_params p = {0};
	struct ring *r = m->more = calloc(1, sizeof *r);
	r->fd = (int)syscall(SYS_io_uring_setup, 4, &p);
	if (r->fd < 0 || pipe(m->fd))
		return 1;
	size_t sq = p.sq_off.array + p.sq_entries * sizeof(unsigned);
	size_t cq = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
	int prot = PROT_READ | PROT_WRITE;
	char *s = mmap(NULL, sq, prot, MAP_SHARED, r->fd, IORING_OFF_SQ_RING);
	char *c = mmap(NULL, cq, prot, MAP_SHARED, r->fd, IORING_OFF_CQ_RING);
	r->sqes = mmap(NULL, p.sq_entries * sizeof *r->sqes, prot, MAP_SHARED, r->fd,
		       IORING_OFF_SQES);
	if (s == MAP_FAILED || c == MAP_FAILED || (void *)r->sqes == MAP_FAILED)
		return 1;
	r->sq_tail = (void *)(s + p.sq_off.tail);
	r->sq_mask = (void *)(s + p.sq_off.ring_mask);
	r->sq_array = (void *)(s + p.sq_off.array);
	r->cq_head = (void *)(c + p.cq_off.head);
	r->cq_tail = (void *)(c + p.cq_off.tail);
	r->cq_mask = (void *)(c + p.cq_off.ring_mask);
	r->cqes = (void *)(c + p.cq_off.cqes);
	return 0;
}

static long uring_wait(struct mode *m)
{
	struct ring *r = m->more;
	if (!r->under_way) {
		unsigned tail = *r->sq_tail, index = tail & *r->sq_mask;
		r->sqes[index] = (struct io_uring_sqe){.opcode = IORING_OP_READ,
						       .fd = m->fd[0],
						       .addr = (uint64_t)(uintptr_t)&r->value,
						       .len = sizeof r->value};
		r->sq_array[index] = index;
		__atomic_store_n(r->sq_tail, tail + 1, __ATOMIC_RELEASE);
		if (syscall(SYS_io_uring_enter, r->fd, 1, 0, 0, NULL, 0) != 1)
			die("io_uring_enter");
		r->under_way = 1;
	}
	struct {
		uint64_t mask;
		uint32_t size, pad;
		uint64_t time;
	} extra = {.time = (uint64_t)(uintptr_t)&timeout};
	if (*r->cq_head == __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE) &&
	    syscall(SYS_io_uring_enter, r->fd, 0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG,
		    &extra, sizeof extra) < 0)
		return -1;
	errno = EAGAIN;
	if (*r->cq_head == __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE))
		return -1;
	long count = r->cqes[*r->cq_head & *r->cq_mask].res;
	__atomic_store_n(r->cq_head, *r->cq_head + 1, __ATOMIC_RELEASE);
	r->under_way = 0;
	return took(count, &r->value);
}

// ---- System V, futex ----

static int semop_begin(struct mode *m)
{
	m->fd[0] = semget(IPC_PRIVATE, 1, 0600);
	return m->fd[0] < 0 || pipe((int *)(m->more = calloc(2, sizeof(int))));
}

static long semop_wait(struct mode *m)
{
	struct sembuf down = {0, -1, 0};
	long value;
	if (semtimedop(m->fd[0], &down, 1, &timeout))
		return -1;
	return took(read(((int *)m->more)[0], &value, sizeof value), &value);
}

static void semop_feed(struct mode *m, long value)
{
	struct sembuf up = {0, 1, 0};
	if (write(((int *)m->more)[1], &value, sizeof value) != sizeof value ||
	    semop(m->fd[0], &up, 1))
		die("semop");
}

static int msgrcv_begin(struct mode *m)
{
	m->fd[0] = msgget(IPC_PRIVATE, 0600);
	return m->fd[0] < 0;
}

static long msgrcv_wait(struct mode *m)
{
	struct {
		long type, value;
	} message;
	return took(msgrcv(m->fd[0], &message, sizeof message.value, 0, 0), &message.value);
}

static void msgrcv_feed(struct mode *m, long value)
{
	struct {
		long type, value;
	} message = {1, value};
	if (msgsnd(m->fd[0], &message, sizeof message.value, 0))
		die("msgsnd");
}

static long futex_wait(struct mode *m)
{
	if (m->word > m->rounds)
		return m->word > LAST && m->rounds == sent ? LAST : m->rounds;
	long r = syscall(SYS_futex, &m->word, FUTEX_WAIT, m->rounds, &timeout, NULL, 0);
	if (r == 0 || errno == ETIMEDOUT)
		errno = EAGAIN;
	return -1;
}

static void futex_feed(struct mode *m, long value)
{
	m->word = (unsigned)value + 1;
	syscall(SYS_futex, &m->word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static int nothing(struct mode *m)
{
	(void)m;
	return 0;
}

struct mode modes[MODES] = {
	{.name = "recv", .begin = recv_begin, .wait = recv_wait, .feed = put},
	{.name = "read", .begin = recv_begin, .wait = read_wait, .feed = put},
	{.name = "accept", .begin = accept_begin, .wait = accept_wait, .feed = accept_feed},
	{.name = "send", .begin = send_begin, .wait = send_wait},
	{.name = "connect", .begin = connect_begin, .wait = connect_wait},
	{.name = "sigwait", .begin = nothing, .wait = sigwait_wait, .feed = sigwait_feed},
	{.name = "signalfd", .begin = signalfd_begin, .wait = signalfd_wait, .feed = signalfd_feed},
	{.name = "epoll", .begin = epoll_begin, .wait = epoll_wait_, .feed = put},
	{.name = "poll", .begin = pipe_begin, .wait = poll_wait, .feed = put},
	{.name = "select", .begin = pipe_begin, .wait = select_wait, .feed = put},
	{.name = "nanosleep", .begin = nothing, .wait = nanosleep_wait},
	{.name = "uring", .begin = uring_begin, .wait = uring_wait, .feed = put},
	{.name = "semop", .begin = semop_begin, .wait = semop_wait, .feed = semop_feed},
	{.name = "msgrcv", .begin = msgrcv_begin, .wait = msgrcv_wait, .feed = msgrcv_feed},
	{.name = "futex", .begin = nothing, .wait = futex_wait, .feed = futex_feed},
};
