// SPDX-License-Identifier: Apache-2.0
/*
 * Maps, touches and unmaps memory by known functions and known numbers of bytes.
 *
 *     memory MODE ROUNDS PAUSE_US
 *
 * Waits for a line on its input, does ROUNDS rounds, prints "done", waits again, and ends. Every
 * round takes PAUSE_US longer than its work.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define UNIT (256UL << 10)
#define MANY 4096

static void *kept[MANY];
static int count;

static void wait_for_line(void)
{
	char line[16];

	if (!fgets(line, sizeof(line), stdin))
		exit(1);
}

__attribute__((noinline)) static void touch(char *at, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += 4096)
		((volatile char *)at)[i] = 1;
}

static void *map(size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED)
		exit(2);
	return at;
}

/* Grows by three units a round, and by one. */
__attribute__((noinline)) static void grow_much(void)
{
	touch(map(3 * UNIT), 3 * UNIT);
}

__attribute__((noinline)) static void grow_little(void)
{
	touch(map(UNIT), UNIT);
}

/* Gives back what it mapped: whole, in two halves from either end, and by another size. */
__attribute__((noinline)) static void come_and_go(void)
{
	char *whole = map(4 * UNIT), *parts = map(4 * UNIT), *moved = map(UNIT);

	touch(whole, UNIT);
	munmap(whole, 4 * UNIT);
	munmap(parts, UNIT);
	munmap(parts + 3 * UNIT, UNIT);
	munmap(parts + UNIT, 2 * UNIT);
	moved = mremap(moved, UNIT, 2 * UNIT, MREMAP_MAYMOVE);
	munmap(moved, 2 * UNIT);
}

/* Cuts a hole into what it keeps, which only the list of mappings shows. */
__attribute__((noinline)) static void cut_hole(void)
{
	char *at = map(4 * UNIT);

	munmap(at + UNIT, 2 * UNIT);
}

/* Moves one mapping over the head of another, and unmaps what is left from its end on. */
__attribute__((noinline)) static void move_over(void)
{
	char *larger = map(8 * UNIT), *smaller = map(UNIT);

	if (mremap(smaller, UNIT, UNIT, MREMAP_MAYMOVE | MREMAP_FIXED, larger) == MAP_FAILED)
		exit(5);
	munmap(larger + 4 * UNIT, 4 * UNIT);
	munmap(larger, 4 * UNIT);
}

#define PIECES 24

/* Unmaps more pieces at once than are followed, then maps less where the first one began. */
__attribute__((noinline)) static void unmap_many(void)
{
	char *room = map((PIECES + 8) * UNIT);

	munmap(room, (PIECES + 8) * UNIT);
	for (int i = 0; i < PIECES; i++)
		if (mmap(i ? room + (7 + i) * UNIT : room, i ? UNIT : 8 * UNIT,
			 PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
			 -1, 0) == MAP_FAILED)
			exit(6);
	munmap(room, (PIECES + 8) * UNIT);
	if (mmap(room, UNIT, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED)
		exit(7);
	munmap(room + 4 * UNIT, 4 * UNIT);
	munmap(room, UNIT);
}

#define LARGE (16UL << 20) /* a mapping of this size is always followed */
#define OVER 17		   /* mappings, one more than are looked at in one range */

static void *map_at(char *at, size_t bytes)
{
	if (mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
		 0) != at)
		exit(8);
	return at;
}

/* Maps over more mappings at once than are followed, so that the first one is known still. Each round ends
 * at other addresses. */
__attribute__((noinline)) static void map_over_many(void)
{
	static char *room;
	static long round;

	if (!room) {
		room = mmap(NULL, 2 * OVER * LARGE, PROT_NONE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (room == MAP_FAILED)
			exit(9);
	}
	char *first = room + 4096 * round++ % (OVER * LARGE);

	for (int i = 0; i < OVER; i++)
		map_at(first + i * LARGE, LARGE);
	map_at(first, OVER * LARGE);
	munmap(first, OVER * LARGE);
}

/* Gives all back, the tail first: only by its end is it known whose that was. */
__attribute__((noinline)) static void tail_first(void)
{
	char *at = map(2 * LARGE);

	munmap(at + LARGE, LARGE);
	munmap(at, LARGE);
}

/* Forgets what it asked malloc for: too large for the heap, then small. */
__attribute__((noinline)) static void *leak_large(void)
{
	return memset(malloc(UNIT), 1, UNIT);
}

__attribute__((noinline)) static void leak_small(void)
{
	for (int i = 0; i < 256; i++)
		kept[i % MANY] = memset(malloc(1000), 1, 1000);
}

/* The heap's end goes up and down again. */
__attribute__((noinline)) static void breathe(void)
{
	if (sbrk(2 * UNIT) == (void *)-1 || sbrk(UNIT) == (void *)-1)
		exit(3);
	if (sbrk(-3 * (long)UNIT) == (void *)-1)
		exit(3);
}

/* A system call touches the pages. */
__attribute__((noinline)) static void read_into(FILE *zero)
{
	static char *at;

	at = map(UNIT);
	if (read(fileno(zero), at, UNIT) != (long)UNIT)
		exit(4);
}

/* As many page faults as there is time for. */
__attribute__((noinline)) static void churn(void)
{
	char *at = map(16 * UNIT);

	touch(at, 16 * UNIT);
	munmap(at, 16 * UNIT);
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	int rounds = argc > 2 ? atoi(argv[2]) : 1;
	int pause_us = argc > 3 ? atoi(argv[3]) : 0;
	FILE *zero = fopen("/dev/zero", "r");

	puts("ready");
	fflush(stdout);
	wait_for_line();
	for (int i = 0; i < rounds; i++) {
		if (!strcmp(mode, "grow")) {
			grow_much();
			grow_little();
		} else if (!strcmp(mode, "cycle")) {
			come_and_go();
		} else if (!strcmp(mode, "over")) {
			move_over();
		} else if (!strcmp(mode, "many")) {
			unmap_many();
		} else if (!strcmp(mode, "many_over")) {
			map_over_many();
		} else if (!strcmp(mode, "tail")) {
			tail_first();
		} else if (!strcmp(mode, "hole")) {
			cut_hole();
		} else if (!strcmp(mode, "leak")) {
			kept[count++ % MANY] = leak_large();
			leak_small();
			come_and_go();
		} else if (!strcmp(mode, "breathe")) {
			breathe();
		} else if (!strcmp(mode, "churn")) {
			churn();
		} else if (!strcmp(mode, "read")) {
			read_into(zero);
		} else {
			return 5;
		}
		if (pause_us)
			usleep(pause_us);
	}
	puts("done");
	fflush(stdout);
	wait_for_line();
	return 0;
}
