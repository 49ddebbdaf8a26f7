// SPDX-License-Identifier: Apache-2.0
// Sections: which threads are in a launch that is timed, from the search for a pool (of pairs of events) to
// the end of the pair (the two events around the launch). A thread has one section at a time, under its tid.
//
// A stream capture of the program, or another profiler, that begins must not find half a pair in a stream:
// launches_wait_out() waits, within a bound, until no thread is in a section.
//
// A thread may end in its section: a launch that blocks in the driver is a place where pthread_cancel acts,
// and a handler of the program may call pthread_exit. It runs nothing of ours then, so our own thread clears
// the sections of threads that have ended.
#include "cuda.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SECTIONS 64 // threads that launch at the same moment; beyond that untimed (lost_pool)
#define WAIT_OUT_NS 50000000u // the program's thread that begins a capture waits this long at most
#define SUSPECT_NS 20000000u  // in a section for longer: it is checked that the thread lives

static struct section sections[SECTIONS];

struct section *section_enter(void)
{
	uint32_t tid = self_sampling.tid;
	for (uint32_t k = 0; k < SECTIONS; k++) {
		struct section *s = &sections[(tid + k) % SECTIONS];
		uint32_t nobody = 0;
		if (atomic_compare_exchange_strong(&s->tid, &nobody, tid)) {
			atomic_store(&s->since_ns, now_ns());
			return s;
		}
	}
	return NULL;
}

void section_leave(struct section *s)
{
	atomic_store(&s->sample, NULL);
	atomic_store(&s->tid, 0);
}

bool launches_under_way(void)
{
	for (int k = 0; k < SECTIONS; k++)
		if (atomic_load(&sections[k].tid))
			return true;
	return false;
}

void launches_wait_out(void)
{
	uint64_t begun_ns = now_ns();
	for (int i = 0; launches_under_way() && now_ns() - begun_ns < WAIT_OUT_NS; i++) {
		if (i > 50)
			nap(5000); // and the thread's timer slack, 50 us as a rule
		else
			__builtin_ia32_pause();
	}
}

// Not seen where a new thread of the process has got the number: that section stays, one of SECTIONS, and
// a thread that begins a capture waits WAIT_OUT_NS. Numbers come back only after all others were given out.
static bool has_ended(uint32_t tid)
{
	return syscall(SYS_tgkill, getpid(), tid, 0) && errno == ESRCH;
}

void sections_poll(void)
{
	for (int k = 0; k < SECTIONS; k++) {
		struct section *s = &sections[k];
		uint32_t tid = atomic_load(&s->tid);
		if (!tid || now_ns() < atomic_load(&s->since_ns) + SUSPECT_NS || !has_ended(tid))
			continue;
		struct sample *sample = atomic_load(&s->sample);
		COUNT(lost_order, 1);
		if (sample) {
			sampling_carry(sample->record.type, sample->record.weight);
			pool_give_back(sample);
		}
		section_leave(s);
	}
}

void sections_forget(void)
{
	memset(sections, 0, sizeof sections);
}
