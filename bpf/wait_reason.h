/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Why a thread leaves its CPU, and whether it is a thread or an interrupt that wakes it. Include task.h before. */
#ifndef SONDE_WAIT_REASON_H
#define SONDE_WAIT_REASON_H

#define TASK_STOPPED_OR_TRACED (0x4 | 0x8)
#define TASK_DEAD (0x10 | 0x20 | 0x80)

static __always_inline u32 state_of(struct task_struct *task)
{
	if (bpf_core_field_exists(task->__state))
		return task->__state;
	return BPF_CORE_READ((struct task_struct___before_5_14 *)task, state);
}

/* Number of the system call a user thread is in, or WAIT_PAGE_FAULT when it entered otherwise. */
static __always_inline s32 entered_by(struct task_struct *task)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
#if defined(__TARGET_ARCH_x86)
	s32 nr = (s32)regs->orig_ax;
#elif defined(__TARGET_ARCH_arm64)
	s32 nr = regs->syscallno;
#endif
	return nr < 0 ? WAIT_PAGE_FAULT : nr;
}

static __always_inline s32 reason_of(struct task_struct *task, u32 state, bool preempted)
{
	if (preempted || !state)
		return WAIT_PREEMPTED;
	if (task->flags & PF_KTHREAD)
		return WAIT_KERNEL;
	if (state & TASK_STOPPED_OR_TRACED)
		return WAIT_STOPPED;
	return entered_by(task);
}

/*
 * Interrupts wake threads too (timers, devices), and the task they happen to stop is not the waker.
 * An interrupt that stopped user code shows in the task's registers: it is in no system call. One
 * that stopped kernel code runs on a separate stack, and so do we.
 */
#define THREAD_STACK (16 * 1024)

static __always_inline bool in_interrupt(struct task_struct *task)
{
	char here;
	u64 depth;

	/* The address of the stack as a number. Verifiers before 6.8 take a number off no pointer of
	 * theirs, but one pointer off another. */
	asm volatile("%0 = %1\n%0 -= %2" : "=&r"(depth) : "r"(&here), "r"(task));
	depth += bpf_get_current_task() - (u64)task->stack;
	if (depth >= THREAD_STACK)
		return true;
	return !(task->flags & PF_KTHREAD) && entered_by(task) == WAIT_PAGE_FAULT;
}

#endif
