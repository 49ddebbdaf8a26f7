/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Why a thread leaves its CPU, and whether it is a thread or an interrupt that wakes it. Include task.h before. */
#ifndef SONDE_WAIT_REASON_H
#define SONDE_WAIT_REASON_H

/* Bits of a task's state: __TASK_STOPPED, __TASK_TRACED; EXIT_DEAD, EXIT_ZOMBIE, TASK_DEAD. */
#define TASK_STOPPED_OR_TRACED (0x4 | 0x8)
#define TASK_ENDED (0x10 | 0x20 | 0x80)

static __always_inline u32 state_of(struct task_struct *task)
{
	if (bpf_core_field_exists(task->__state))
		return task->__state;
	return BPF_CORE_READ((struct task_struct___before_5_14 *)task, state);
}

/* Number of the system call that a user thread is in; WAIT_PAGE_FAULT where it entered the kernel otherwise. */
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

#define THREAD_STACK (16 * 1024) /* bytes of a thread's kernel stack (THREAD_SIZE) */

/*
 * Whether an interrupt runs on this CPU. Interrupts wake threads too (timers, devices), and the task that they
 * happen to stop is not the waker. One that stopped user code shows in the task's registers: it is in no
 * system call. (So is a task in a page fault or another exception: one that wakes a thread there, as by
 * userfaultfd, counts as an interrupt.) One that stopped kernel code runs on a separate stack, and so does this
 * program.
 */
static __always_inline bool in_interrupt(struct task_struct *task)
{
	char here;
	u64 depth;

	/* How far the program's stack is above the thread's. Verifiers before 6.8 allow no number to be
	 * subtracted from a pointer to their stack or to a task, but one pointer from another. */
	asm volatile("%0 = %1\n%0 -= %2" : "=&r"(depth) : "r"(&here), "r"(task));
	depth += bpf_get_current_task() - (u64)task->stack;
	if (depth >= THREAD_STACK)
		return true;
	return !(task->flags & PF_KTHREAD) && entered_by(task) == WAIT_PAGE_FAULT;
}

#endif
