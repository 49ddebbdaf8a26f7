// SPDX-License-Identifier: Apache-2.0
// Steps: when a thread of ours is in a device library, and how others keep it out.
#include "internal.h"

#define STEP_WAIT_NS 2000000000ull /* longest wait of the program for a step of ours */

static _Atomic int stepping, stoppers; /* threads in a step; callers of steps_stop */
static _Atomic bool closed;

bool step_is_unwanted(void)
{
	return atomic_load(&stoppers) > 0 || atomic_load(&closed);
}

bool steps_are_closed(void)
{
	return atomic_load(&closed);
}

bool step_begin(void)
{
	atomic_fetch_add(&stepping, 1);
	if (likely(!step_is_unwanted()))
		return true;
	atomic_fetch_sub(&stepping, 1);
	return false;
}

void step_end(void)
{
	atomic_fetch_sub(&stepping, 1);
}

void short_nap(int turn)
{
	if (turn > 100)
		nap(20000);
	else
		__builtin_ia32_pause();
}

static void wait_for_step(void)
{ // bounded: a driver that hangs must not hang the host
	uint64_t until = now_ns() + STEP_WAIT_NS;
	for (int i = 0; atomic_load(&stepping) && now_ns() < until; i++)
		short_nap(i);
}

void steps_stop(void)
{
	atomic_fetch_add(&stoppers, 1);
	wait_for_step();
}

void steps_resume(void)
{
	atomic_fetch_sub(&stoppers, 1);
}

void steps_forget(void)
{
	atomic_store(&stepping, 0);
	atomic_store(&stoppers, 0);
}

void steps_close(void)
{
	atomic_store(&closed, true);
	wait_for_step();
}
