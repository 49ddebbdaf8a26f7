/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Memory for the walks of programs on uprobes. Those stay on their CPU but can be preempted by others: so
 * each CPU has memory for a few walks at a time.
 *
 * From Linux 6.13 on, programs of their type have a separate stack on each CPU: the kernel takes it that none
 * runs twice at once there. Those on uprobes do, and write to each other's stack: with 7.2 that was a wild pointer
 * and an oops, within seconds. A program with a tail call in it keeps the thread's stack; the verifier looks for
 * the instruction before it removes what is never reached. So each has STAY_ON_STACK.
 */
#ifndef SONDE_WALK_SCRATCH_H
#define SONDE_WALK_SCRATCH_H

#define SCRATCH_SLOTS 2

const volatile bool never = false;

/* One for each way to attach: programs that differ in it may not share one. */
#define NO_PROGRAMS(name)                                                                          \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_PROG_ARRAY);                                             \
		__uint(max_entries, 1);                                                            \
		__type(key, u32);                                                                  \
		__type(value, u32);                                                                \
	} name SEC(".maps")

#define STAY_ON_STACK(ctx, programs)                                                               \
	do {                                                                                       \
		if (never)                                                                         \
			bpf_tail_call(ctx, &(programs), 0);                                        \
	} while (0)

struct walk_scratch {
	u64 is_taken;
	struct unwind_walk walk;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SCRATCH_SLOTS);
	__type(key, u32);
	__type(value, struct walk_scratch);
} scratch SEC(".maps");

/* Memory for one walk, until scratch_release; NULL where all is taken, which is counted as a loss. */
static __always_inline struct walk_scratch *scratch_claim(void)
{
	for (u32 slot = 0; slot < SCRATCH_SLOTS; slot++) {
		const u32 at = slot;
		struct walk_scratch *mine = bpf_map_lookup_elem(&scratch, &at);

		if (mine && !__sync_lock_test_and_set(&mine->is_taken, 1))
			return mine;
	}
	count_stop(STOP_BUSY);
	count_loss(LOSS_USER_STACK);
	return NULL;
}

static __always_inline void scratch_release(struct walk_scratch *mine)
{
	__sync_lock_test_and_set(&mine->is_taken, 0);
}

#endif
