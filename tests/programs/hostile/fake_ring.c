// SPDX-License-Identifier: Apache-2.0
// A ring as the library makes it, filled by a process that is none of the library's.
//
//     fake_ring LIBRARY RATE
//
// LIBRARY is a file that is mapped as code. RATE: records a second, all of one kernel; 0: as many as
// the ring takes, each with another stack, another name and another thread.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "inject.h"

#define NAME_BYTES 2040u
#define AT_ONCE 20000u

static struct inject_record *ring;
static struct inject_state *state;
static unsigned char *names;

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static uint64_t any(void)
{
	static uint64_t x = 88172645463325252ull;
	x ^= x << 13, x ^= x >> 7, x ^= x << 17;
	return x;
}

static uint32_t put_name(uint32_t at, const char *text, uint32_t length)
{
	struct inject_name *name = (void *)(names + at);
	name->length = length;
	if (text)
		memcpy(name->text, text, length);
	else
		for (uint32_t i = 0; i < length; i++)
			name->text[i] = (char)('a' + any() % 26);
	return at;
}

static void put_run(uint64_t head, uint32_t name, uint32_t tid, uint64_t correlation)
{
	uint64_t now = now_ns();
	ring[head % INJECT_RING_RECORDS] = (struct inject_record){
		.seq = head + 1,
		.type = INJECT_KERNEL,
		.source = INJECT_BY_EVENT,
		.name = name,
		.correlation = correlation,
		.start_ns = now - 1000,
		.end_ns = now,
		.weight = 1,
		.tid = tid,
	};
}

static void put_stack(uint64_t head, uint64_t correlation)
{
	struct inject_frames frames = {
		.seq = head + 1,
		.type = INJECT_FRAMES,
		.parts = 1,
		.frames = INJECT_FRAMES_EACH,
		.correlation = correlation,
	};
	for (int i = 0; i < INJECT_FRAMES_EACH; i++)
		frames.address[i] = any() >> 18;
	memcpy(&ring[head % INJECT_RING_RECORDS], &frames, sizeof frames);
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	double rate = atof(argv[2]);
	int fd = memfd_create(INJECT_MEMFD, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int high = fcntl(fd, F_DUPFD_CLOEXEC, 600);
	int library = open(argv[1], O_RDONLY | O_CLOEXEC);
	if (ftruncate(high, INJECT_BYTES) ||
	    fcntl(high, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW) || library < 0)
		return 1;
	char *at = mmap(NULL, INJECT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, high, 0);
	if (at == MAP_FAILED ||
	    mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, library, 0) == MAP_FAILED)
		return 1;
	ring = (void *)(at + INJECT_RING_AT);
	state = (void *)(at + INJECT_STATE_AT);
	names = (void *)(at + INJECT_NAMES_AT);
	const struct inject_control *control = (void *)(at + INJECT_CONTROL_AT);
	struct inject_header *header = (void *)(at + INJECT_HEADER_AT);
	uint32_t kept = 0, step = (NAME_BYTES + 15) & ~7u;
	if (rate)
		put_name(8, "honest", 6);
	else
		for (uint32_t to = 8; to + step < INJECT_NAMES_BYTES; to += step, kept++)
			put_name(to, NULL, NAME_BYTES);
	header->abi = INJECT_ABI;
	header->bytes = INJECT_BYTES;
	header->pid = (uint32_t)getpid();
	header->generation = 1;
	header->magic = INJECT_MAGIC;
	state->status = INJECT_TIMING;
	puts("ready");
	fflush(stdout);
	uint64_t head = 0, began = now_ns();
	for (;;) {
		uint64_t until =
			rate ? (uint64_t)((double)(now_ns() - began) / 1e9 * rate) : head + AT_ONCE;
		while (head < until && head - control->tail < INJECT_RING_RECORDS) {
			if (rate) {
				put_run(head, 8, (uint32_t)getpid(), head + 1);
				head++;
				continue;
			}
			put_stack(head, head);
			head++;
			put_run(head, 8 + step * (uint32_t)(any() % kept), (uint32_t)any() >> 1,
				head - 1);
			head++;
		}
		state->launches = state->sampled = state->timed = head;
		state->host_ns = head * (rate ? 11000 : 1000);
		state->polled_ns = now_ns();
		__atomic_store_n(&state->head, head, __ATOMIC_RELEASE);
		usleep(20000);
	}
}
