// SPDX-License-Identifier: Apache-2.0
// The stack of a sampled launch: by frame pointers here, or by a probe on sonde_inject_site.
#include "internal.h"

#include <pthread.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

// Only a place for an agent's uprobe, which takes the stack here. Every kernel emulates a nop of one byte; some
// single-step longer ones, at many times the cost, and others rewrite them.
__attribute__((noinline)) void sonde_inject_site(uint64_t correlation)
{
	__asm__ volatile(".byte 0x90" : : "D"(correlation) : "memory");
}

// The main thread's stack: it ends, roughly, where the kernel put AT_RANDOM's bytes at the start, and is taken for
// this long. Not by pthread_getattr_np, which for that thread reads a file and allocates.
#define MAIN_STACK_MOST (64ul << 20)

static void find_stack(struct thread_sampling *t)
{
	pthread_attr_t attributes;
	void *low = NULL;
	size_t size = 0;
	t->stack_low = t->stack_end = 1;
	if (t->tid == (uint32_t)getpid()) {
		uintptr_t end = getauxval(AT_RANDOM);
		if (end > MAIN_STACK_MOST) {
			t->stack_low = end - MAIN_STACK_MOST;
			t->stack_end = end;
		}
		return;
	}
	if (pthread_getattr_np(pthread_self(), &attributes))
		return;
	pthread_attr_getstack(&attributes, &low, &size);
	pthread_attr_destroy(&attributes);
	t->stack_low = (uintptr_t)low;
	t->stack_end = (uintptr_t)low + size;
}

void frames_walk(struct frames *to, void *frame, uint64_t caller)
{
	struct thread_sampling *t = &self_sampling;
	if (!t->stack_end)
		find_stack(t);
	uintptr_t at = (uintptr_t)frame, lowest = (uintptr_t)&at;
	to->count = 0;
	to->address[to->count++] = caller;
	// On a stack that the program made (a coroutine's, a signal handler's) it is not known what is mapped
	// between here and its end.
	if (lowest < t->stack_low || lowest >= t->stack_end)
		return;
	// Every word read lies between here and the stack's end: mapped, whatever it holds.
	for (;;) {
		if (at < lowest || at & 7 || at + 16 > t->stack_end || to->count == MAX_FRAMES)
			return;
		uintptr_t next = ((uintptr_t *)at)[0], back = ((uintptr_t *)at)[1];
		if (back < 4096)
			return;
		if (back != caller || to->count > 1)
			to->address[to->count++] = back;
		if (next <= at)
			return;
		at = next;
	}
}

void frames_put(const struct frames *frames, uint64_t correlation, uint32_t tid)
{
	uint32_t parts = (frames->count + INJECT_FRAMES_EACH - 1) / INJECT_FRAMES_EACH;
	for (uint32_t part = 0; part < parts; part++) {
		union {
			struct inject_frames frames;
			struct inject_record record;
		} u;
		uint32_t from = part * INJECT_FRAMES_EACH, n = frames->count - from;
		memset(&u, 0, sizeof u);
		u.frames.type = INJECT_FRAMES;
		u.frames.part = (uint8_t)part;
		u.frames.parts = (uint8_t)parts;
		u.frames.frames = n < INJECT_FRAMES_EACH ? n : INJECT_FRAMES_EACH;
		u.frames.correlation = correlation;
		u.frames.tid = tid;
		memcpy(u.frames.address, frames->address + from, 8ul * u.frames.frames);
		if (!shared_put(&u.record))
			return;
	}
}
