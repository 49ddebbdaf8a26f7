/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What crosses from the kernel to user space. The loader reads these layouts from the compiled
 * object's BTF, so a field added here is seen by its name on the other side; collectors state the
 * fields they expect and refuse to start when they differ (tests/unit/test_abi.py).
 *
 * Identity of a process: (tgid, start_ns), start_ns = start of its leader in ns since boot.
 * Times: CLOCK_MONOTONIC in ns.
 */
#ifndef SONDE_EVENTS_H
#define SONDE_EVENTS_H

#define SONDE_KERNEL_FRAMES 48
#define SONDE_USER_FRAMES 127

/* Every way in which something observed may fail to reach user space; index into `losses`. */
enum sonde_loss {
	LOSS_STACK_MAP_FULL, /* a new stack found no room: counted without its frames */
	LOSS_COUNT_MAP_FULL, /* a new row found no room at all: its weight is gone */
	LOSS_TASK_STORAGE,   /* per-thread state could not be made: an event was not seen */
	LOSS_RING_FULL,	     /* a span found no room in the ring */
	LOSS_USER_STACK,     /* the user stack could not be read: kernel frames only */
	LOSS_NESTED_CALL,    /* a call began inside another that never returned */
	LOSS_TARGETS_FULL,   /* a child of a watched process could not be watched */
	LOSS_NOTES_FULL, /* a note found no room: to whom a process belongs, or a new control group */
	LOSS_REQUESTS,	 /* a request to a block device found no room while it was under way */
	LOSS_MAPPINGS,	 /* a mapping found no room: its unmapping will not be seen */
	LOSS_BY_PROCESS, /* no separate row: counted by process, without thread and stack */
	LOSS_TOGETHER, /* no room for such a row, or a share is used up: counted in one row for all the rest */
	LOSS_SHARE, /* beyond the part of a shared map or ring that one process or user may take */
	LOSS_OVER_BUDGET, /* calls of this function by one party (a user or container) cost too much */
	LOSS_SEVERAL_REQUESTS, /* a traced request of a thread that had unanswered ones: not followed */
	LOSS_SOCKET_STORAGE, /* no state for a connection: it is not counted, or not from its beginning */
	LOSS_TRACED, /* a traced request, or a sample of one, for which its party's share or the ring is used up */
	LOSS_UNSEEN_SWITCH, /* the kernel ran no program as a thread got its CPU: how long it waited is not known */
	LOSS_MAX,
};

/*
 * One stack, stored once under its hash. Leaf first. A long one is stored in pieces, each naming the
 * one that goes on toward the thread's entry; pieces are shared by all stacks that have them.
 * A user frame is an address, or two words of an interpreted frame (abi/unwind.h); zero fills a piece's end.
 */
struct sonde_stack {
	__u32 kernel_len;
	__u32 user_len;
	__u64 kernel[SONDE_KERNEL_FRAMES];
	__u64 user[SONDE_USER_FRAMES];
	__u64 next;    /* id of the piece that follows, 0: none */
	__u32 stop;    /* enum unwind_stop: why the walk ended; 0: it reached the thread's entry */
	__u32 is_tail; /* a piece behind the first: no row names it */
};

/* ---- on-CPU samples ---- */

struct cpu_key {
	__u32 tgid;
	__u32 tid;
	__u64 start_ns;
	__u64 stack_id; /* 0: the stack found no room */
};

struct cpu_value {
	__u64 count;
};

/* ---- waits: blocked, then waiting for a CPU ---- */

/* Reasons below zero; a reason of zero or more is the number of the system call the thread is in. */
enum wait_reason {
	WAIT_PREEMPTED = -1,  /* ready all the time, another thread had the CPU */
	WAIT_PAGE_FAULT = -2, /* entered the kernel by a fault, not by a call */
	WAIT_STOPPED = -3,    /* stopped by a signal or a tracer */
	WAIT_KERNEL = -4,     /* a kernel thread */
	WAIT_NEW = -5,	      /* a new thread before its first run */
};

struct wait_key {
	__u32 tgid;
	__u32 tid;
	__u64 start_ns;
	__u64 stack_id; /* 0: no stack was taken of these waits */
	__s32 reason;
	__u32 unused;
};

struct wait_value {
	__u64 count; /* waits that ended in this interval; one still going on adds time only */
	__u64 blocked_ns;
	__u64 runqueue_ns;
	__u64 weight_count; /* as above, each divided by the probability that its stack is taken */
	__u64 weight_blocked_ns;
	__u64 weight_runqueue_ns;
	__u64 max_blocked_ns;
	__u64 max_runqueue_ns;
	__u32 waker_tgid; /* who ended the last one */
	__u32 waker_tid;
};

/* A single long wait. */
struct wait_span {
	__u64 start_time_ns;
	__u64 wake_time_ns;
	__u64 end_time_ns;
	__u64 start_ns;
	__u64 stack_id;
	__u32 tgid;
	__u32 tid;
	__s32 reason;
	__u32 waker_tgid;
	__u32 waker_tid;
	__u32 unused;
};

/* ---- samples and waits of traced requests ---- */

#define TRACED_CPU (-100) /* in `reason`: a sample on a CPU */

/* One sample, or one wait whose stack was taken, with its weights. */
struct traced_sample {
	__u64 time_ns;
	__u64 start_ns;
	__u64 stack_id;
	__u64 trace_hi; /* the trace's number, its upper half */
	__u64 trace_lo;
	__u64 span_id;
	__u64 count; /* samples, or waits that this one stands for */
	__u64 blocked_ns;
	__u64 runqueue_ns;
	__u32 tgid;
	__u32 tid;
	__s32 reason; /* TRACED_CPU, or enum wait_reason */
	__u32 unused;
};

/* ---- a dump: one stack of every thread of a process (sonde dump) ---- */

struct dump_key {
	__u32 tgid;
	__u32 tid;
	__u64 start_ns;
};

struct dump_value {
	__u64 stack_id; /* 0: it was on a CPU, or there was no room */
	__u32 state;	/* the kernel's task state with its exit state */
	__u32 on_cpu;
};

/* ---- device calls ---- */

/* How a call reports its outcome. */
enum call_result {
	RESULT_STATUS, /* returns its status, 0 is success */
	RESULT_HANDLE, /* returns a handle, zero is failure; its status goes where status_arg points */
	RESULT_NONE, /* returns nothing */
};

#define CALL_FAILED (-2147483647 - 1)	  /* status of a failure that gave no number */
#define CALL_STATUS_UNKNOWN (-2147483647) /* of a call whose return is not seen */
#define CALL_ANY_DIRECTION 0xFFFFFFFFU	  /* of calls of several, in one row */

/*
 * How to read one call of a device API; filled from the tables in src/sonde/apis. Arguments are
 * numbered in integer words: registers first, then the stack (where structs passed by value and
 * larger than two words lie, word by word). -1: no such argument.
 */
struct call_spec {
	__s8 size_arg[3]; /* bytes = scale * the product of these */
	__s8 vector_arg; /* points to vector_len size_t at offset vector_at; they are factors, too */
	__u16 vector_at;
	__u8 vector_len;
	__u8 result;	      /* enum call_result */
	__u32 scale;	      /* 0: the call has no size */
	__u32 direction_mask; /* bits of the argument that are the direction */
	__s8 direction_arg;   /* holds the direction, or */
	__u8 direction_len; /* points to this many ints at direction_at: the direction, or both ends */
	__s8 blocking_arg; /* an argument: non-zero, and the call waits until the work is done */
	__s8 status_arg;   /* points to where the status is written */
	__u16 direction_at[2];
	/* Not 0: the function's number. Its calls are counted at their entry, their return is not seen. */
	__u16 at_entry;
	__u16 reserved;
};

enum call_flags {
	CALL_BLOCKING = 1,
	CALL_GOING_ON = 2, /* time so far of a call that has not returned: it adds no count */
};

struct call_key {
	__u32 tgid;
	__u32 tid;
	__u64 start_ns;
	__u64 stack_id; /* 0: not among the sampled */
	__u32 site;	/* one function of one file: index into `sites` */
	__s32 status;
	__u32 direction; /* as the API numbers it */
	__u32 flags;
};

struct call_value {
	__u64 count;
	__u64 nested; /* probed calls inside these, which are counted as a part of them alone */
	__u64 ns;
	__u64 bytes;
	__u64 weight_count;
	__u64 weight_ns; /* a whole call's time, in the interval of its return */
	__u64 weight_bytes;
	__u64 max_ns;
};

struct call_span {
	__u64 start_time_ns;
	__u64 end_time_ns;
	__u64 start_ns;
	__u64 stack_id;
	__u64 bytes;
	__u32 tgid;
	__u32 tid;
	__u32 site;
	__s32 status;
	__u32 direction;
	__u32 flags;
};

/* ---- stacks of the launches that the injected library times ---- */

struct launch_site_key {
	__u32 tgid;
	__u32 unused;
	__u64 start_ns;
	__u64 correlation; /* the launch's number in its process */
};

struct launch_site_value {
	__u64 stack_id; /* 0: there was no room */
};

/* ---- host memory ---- */

enum memory_kind {
	MEMORY_READ = 1,  /* page faults: by a read, */
	MEMORY_WRITE,	  /* by the first write to a page, */
	MEMORY_COPY,	  /* by a write to a page that is shared or was only read */
	MEMORY_ANONYMOUS, /* mappings: private, */
	MEMORY_SHARED,
	MEMORY_FILE,
	MEMORY_RESERVED, /* PROT_NONE: no memory yet */
	MEMORY_HEAP,	 /* brk */
	MEMORY_UNMAPPED, /* by the thread that unmapped, whatever it was */
};

struct memory_key {
	__u32 tgid;
	__u32 tid;
	__u64 start_ns;
	__u64 stack_id; /* 0: not among the sampled */
	__u32 kind;
	__u32 is_freed; /* unmapped later, counted for the stack that had mapped it (memory_mapping) */
};

struct memory_value {
	__u64 count;
	__u64 bytes;
	__u64 weight_count;
	__u64 weight_bytes;
};

/* Where a mapping of a process begins or ends. */
struct memory_place {
	__u64 address;
	__u32 tgid;
	__u32 unused;
};

struct memory_mapping {
	__u64 start_ns;
	__u64 stack_id;
	__u64 bytes;
	__u32 tid;
	__u32 weight;
	__u32 kind;
	__u32 is_part; /* what is left of a mapping beside a hole; its other part is the counted one */
	__u64 party; /* whose it is (bpf/party.h) */
};

/* ---- what processes use ---- */

struct usage_key {
	__u32 tgid;
	__u32 unused;
	__u64 start_ns;
};

/* By the kernel's counters; all threads together. */
struct usage_value {
	__u64 cpu_ns;
	__u64 runqueue_ns; /* ready, without a CPU */
	__u64 runs;	   /* times a CPU was given */
	__u64 voluntary;   /* context switches */
	__u64 involuntary;
	__u64 migrations;
	__u64 minor_faults;
	__u64 major_faults;
	__u64 read_bytes; /* of block devices */
	__u64 written_bytes;
	__u64 reclaims; /* times a thread had to free memory itself (direct reclaim) */
	__u64 reclaim_ns;
	__u64 reclaimed_pages;
};

enum note_kind {
	NOTE_EXEC = 1,
	NOTE_MOVED, /* to another control group */
	NOTE_EXIT,
};

/* To whom a process belongs. Control groups: version 2, then memory, freezer and pids of version 1. */
struct process_note {
	__u64 time_ns;
	__u64 start_ns;
	__u64 cgroup[4];
	__u32 hierarchy[4];
	__u32 kind;
	__u32 tgid;
	__u32 parent_tgid;
	__u32 uid;
	__u32 inner_pid; /* in its own pid namespace */
	__u32 unused;
};

#define SONDE_ENVIRONMENT 8192 /* bytes */

/* The last part of the environment of a program that slurmstepd started: a step of a Slurm job. */
struct step_note {
	__u64 start_ns;
	__u32 tgid;
	__u32 length;
	__u8 environment[SONDE_ENVIRONMENT];
};

/* A control group that was made. */
struct cgroup_note {
	__u64 id;
	__u32 hierarchy;
	__u32 length;
	__u8 path[256];
};

/* ---- block devices ---- */

struct block_key {
	/* 0: by a kernel thread for another's group (writeback, a limit), or no room for a row */
	__u32 tgid;
	__u32 device; /* major << 20 | minor */
	__u64 start_ns;
	__u64 cgroup; /* whom it is charged to */
	__u32 hierarchy;
	__u32 operation; /* enum req_op: 0 read, 1 write, 2 flush, 3 discard */
};

struct block_value {
	__u64 count;
	__u64 bytes;
	__u64 queue_ns;	 /* from a request's start until it reached the device */
	__u64 device_ns; /* from then until it was done */
	__u64 max_ns;	 /* longest single sum of both */
};

/* ---- TCP ---- */

struct flow_key {
	__u32 tgid; /* 0: closed before it was seen which process has it */
	__u16 family;
	__u16 port; /* of the service: the lower one of the two */
	__u64 start_ns;
	__u32 address[4]; /* of the other end, as on the wire */
};

struct flow_value {
	__u64 sent_bytes; /* with what was sent again */
	__u64 received_bytes;
	__u64 retransmitted_bytes;
	__u64 sent_segments;
	__u64 received_segments;
	__u64 retransmits;
	__u64 closed;	   /* connections that ended */
	__u64 max_srtt_us; /* smoothed round trip; this and the next two: largest of some readings */
	__u64 max_send_queue; /* bytes */
	__u64 max_receive_queue;
};

/* ---- system calls ---- */

#define SYSCALLS_ALL 0xffffffffu /* number of those of a process that are counted together */

struct syscall_key {
	__u32 tgid;
	__u32 nr;
	__u64 start_ns;
};

struct syscall_value {
	__u64 count;
	__u64 errors;
	__u64 ns;
	__u64 max_ns;
};

/* ---- run queues ---- */

#define SONDE_DELAYS 32 /* buckets */

/* How long threads of a CPU were ready before they got it; delays[i]: below 2^i ns. */
struct cpu_delays {
	__u64 count;
	__u64 ns;
	__u64 max_ns;
	__u32 delays[SONDE_DELAYS];
};

/* All run queues at one moment. */
struct pulse {
	__u64 time_ns;
	__u64 switches; /* since the start of the machine */
	__u32 running;	/* threads that run or could, on all CPUs */
	__u32 busy;	/* CPUs that run something */
	__u32 longest;	/* of the run queues */
	__u32 io_waiting;
};

/* The run queue of one CPU, looked at several times in an interval. */
struct cpu_queue {
	__u64 looks;
	__u64 running; /* threads that run or could, summed over looks */
	__u64 busy;    /* looks that found it running something */
	__u64 longest;
	__u64 switches;
	__u64 at; /* address of the kernel's struct rq */
};

#endif
