// SPDX-License-Identifier: Apache-2.0
// Of waits.c: what its threads wait in (waits_calls.c), for the server that starts and feeds them.
#ifndef ATTACH_WAITS_H
#define ATTACH_WAITS_H

#include <stdatomic.h>
#include <stdint.h>

#define LAST 0x7ffffff0 // ends a waiter that is fed
#define MODES 15

// One waiter. wait() gets the next value, or -1 with errno; feed() sends it.
struct mode {
	const char *name;
	int (*begin)(struct mode *);
	long (*wait)(struct mode *);
	void (*feed)(struct mode *, long value);
	int fd[2];
	atomic_uint word;
	long rounds, eintr, odd;
	uint64_t sum;
	void *more;
};

extern struct mode modes[MODES];
extern atomic_long sent; // how many values, once all were; -1 before

__attribute__((noreturn)) void die(const char *what);

#endif
