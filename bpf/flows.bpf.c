// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * TCP by process: bytes, segments, what was sent again, queues. The kernel counts in every socket;
 * a scan of the open files of all processes adds what has come since the scan before, and a connection
 * that closes adds what is left. No program runs for each packet.
 *
 * The owner of a connection is the process that connects it or closes it, seen in its own context, or
 * that has it open at a scan: the first of those.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include "../abi/events.h"
#define SONDE_MAX_STACKS 1 /* takes none */
#include "stack.h"
#include "task.h"
#include "host_types.h"
#include "storage_share.h"

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6
/* enum in net/tcp_states.h */
#define TCP_SYN_SENT 2
#define TCP_FIN_WAIT1 4
#define TCP_CLOSE 7
#define TCP_LAST_ACK 9
#define TCP_LISTEN 10

#define FILES_A_READ 8192 /* passed in one read; some 0.3 ms */
#define READ_ENDS_BY 64	  /* bytes: PASSED in native/src/bpf.rs */

SWAPPED_ROWS(flows, struct flow_key, struct flow_value, 4096)
SPARE_ROWS(flows, struct flow_key, struct flow_value, 2048)

/*
 * What has been counted of a connection so far, and whose it is. It begins with the connection and ends with
 * it, not with the socket.
 */
struct counted {
	u32 tgid;    /* 0: not known */
	u32 recount; /* the last one that counted it */
	u64 party;   /* whose share of the storages it takes */
	u64 start_ns;
	u64 sent_bytes;
	u64 received_bytes;
	u64 retransmitted_bytes;
	u64 sent_segments;
	u64 received_segments;
	u64 retransmits;
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct counted);
} sockets SEC(".maps");

/* Whether the first scan had no room for some: a connection without storage may have begun before it, and the
 * kernel's counters with that. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
} first_scan_left_out SEC(".maps");

static __always_inline bool some_left_out(void)
{
	const u32 first = 0;
	u64 *some = bpf_map_lookup_elem(&first_scan_left_out, &first);

	return some && *some;
}

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct task_struct___files {
	void *files;
};
#pragma clang attribute pop

/* For kernels that refuse `on_recount`: scans count the storages, too. They do not see those of sockets that
 * no process has open: connections that end after their process did, descriptors on their way to another
 * process, files registered with io_uring. */
const volatile bool scans_recount = false;

/* The process of `task` owns the socket, unless another one does. */
static __always_inline void set_owner(struct counted *c, struct task_struct *task)
{
	if (c->tgid || task->flags & PF_KTHREAD)
		return;
	c->start_ns = start_of(task);
	c->tgid = task->tgid;
}

/*
 * Sets a counter of `c` to its value now, and that of `added` to the difference. A socket whose connection
 * failed, or was given up (connect() to AF_UNSPEC), counts from 0 again: a difference would be negative, and
 * so next to 2^64. A scan and the end of a connection may come at the same time: what was counted is read
 * first, so that a lower value is a new beginning, and who comes second takes only what was left.
 */
#define TAKE(field, now)                                                                           \
	do {                                                                                       \
		for (int i_ = 0; i_ < 3; i_++) {                                                   \
			u64 old_ = *(volatile u64 *)&c->field, new_;                               \
			barrier();                                                                 \
			new_ = (now);                                                              \
			if (new_ == old_)                                                          \
				break;                                                             \
			if (__sync_val_compare_and_swap(&c->field, old_, new_) != old_)            \
				continue;                                                          \
			added.field = new_ > old_ ? new_ - old_ : new_;                            \
			any |= added.field;                                                        \
			break;                                                                     \
		}                                                                                  \
	} while (0)

#define ADD(field) ADD_TO(v->field, added.field)

#define MOST(field, now)                                                                           \
	do {                                                                                       \
		u64 new_ = (now);                                                                  \
		if (new_ > v->field)                                                               \
			v->field = new_;                                                           \
	} while (0)

/* Adds what the kernel counted of a connection since the last time. `count` false: only remembers it. */
static __always_inline void take(struct sock *sk, struct counted *c, bool count, bool closed)
{
	const struct flow_value zero = {};
	const struct flow_key rest = {};
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);
	struct counted added = {};
	struct flow_key key = {};
	struct flow_value *v;
	u16 local, remote;
	u64 any = closed;

	if (!tcp)
		return;
	TAKE(sent_bytes, tcp->bytes_sent);
	TAKE(received_bytes, tcp->bytes_received);
	TAKE(retransmitted_bytes, tcp->bytes_retrans);
	TAKE(sent_segments, tcp->segs_out);
	TAKE(received_segments, tcp->segs_in);
	TAKE(retransmits, tcp->total_retrans);
	if (!count || !any)
		return;
	if (c->tgid ? !watched(c->tgid) : filter_targets)
		return;
	key.tgid = c->tgid;
	key.start_ns = c->start_ns;
	key.family = sk->__sk_common.skc_family;
	local = sk->__sk_common.skc_num;
	remote = bpf_ntohs(sk->__sk_common.skc_dport);
	/* The service's port is taken to be the lower one. The local one is 0 where the kernel chose it: that is
	 * released before the connection is closed. */
	key.port = !local || (remote && remote < local) ? remote : local;
	if (key.family == AF_INET)
		key.address[0] = sk->__sk_common.skc_daddr;
	else
		bpf_core_read(key.address, sizeof(key.address),
			      &sk->__sk_common.skc_v6_daddr.in6_u.u6_addr32);
	v = find_row(&flows, &key, &zero);
	if (!v) {
		key.family = key.port = 0;
		__builtin_memset(key.address, 0, sizeof(key.address));
		v = spare_row_of(&flows_spare, &key, &zero, &rest);
	}
	if (!v)
		return;
	ADD(sent_bytes);
	ADD(received_bytes);
	ADD(retransmitted_bytes);
	ADD(sent_segments);
	ADD(received_segments);
	ADD(retransmits);
	if (closed) {
		ADD_TO(v->closed, 1);
		return;
	}
	MOST(max_srtt_us, tcp->srtt_us >> 3); /* the kernel keeps 8 times the value */
	MOST(max_send_queue, sk->sk_wmem_queued > 0 ? sk->sk_wmem_queued : 0);
	MOST(max_receive_queue, (u32)(tcp->rcv_nxt - tcp->copied_seq));
}

static __always_inline bool is_tcp(struct sock *sk)
{
	u16 family = sk->__sk_common.skc_family;

	return sk->sk_protocol == IPPROTO_TCP && (family == AF_INET || family == AF_INET6);
}

/* New storage for a connection, in the share of `task`; NULL where there is no room. */
static __always_inline struct counted *new_counted(struct sock *sk, struct task_struct *task)
{
	u64 party = party_of(task);
	struct counted *c = NULL;

	if (may_have_storage(party))
		c = bpf_sk_storage_get(&sockets, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!c) {
		count_loss(LOSS_SOCKET_STORAGE);
		return NULL;
	}
	c->party = party;
	c->recount = running_recount();
	count_storage(party);
	return c;
}

/* A scan passes a storage: it may pass it several times. */
static __always_inline void count_again(struct counted *c)
{
	struct storage_totals *t = totals_of_storages();

	if (!t || t->running == t->done || c->recount == (u32)t->running)
		return;
	c->recount = t->running;
	count_storage_by(t, c->party, t->running);
}

/* Lets the read end in which user space passes files, so that it looks at the time (`walk` in native/src/bpf.rs).
 * Without output it would last for a million. */
static __always_inline void end_read(struct bpf_iter__task_file *ctx)
{
	const char passed[READ_ENDS_BY] = {};

	if (ctx->meta->seq_num % FILES_A_READ == FILES_A_READ - 1)
		bpf_seq_write(ctx->meta->seq, passed, sizeof(passed));
}

/* A file of a process. Of connections that are, or are not, known already what they did is counted, or only noted. */
static __always_inline int scan(struct bpf_iter__task_file *ctx, bool count_known, bool count_new)
{
	struct task_struct *task = ctx->task;
	struct file *file = ctx->file;
	struct socket *socket;
	struct counted *c;
	struct sock *sk;
	const u32 first = 0;
	u64 *some = bpf_map_lookup_elem(&first_scan_left_out, &first);
	bool count = count_known;
	u8 state;

	end_read(ctx);
	/* Threads share their files: those of the first one are enough. */
	if (!task || !file || task->tgid != task->pid)
		return 0;
	socket = bpf_sock_from_file(file);
	if (!socket)
		return 0;
	sk = socket->sk;
	if (!sk || !is_tcp(sk))
		return 0;
	state = sk->__sk_common.skc_state;
	if (state == TCP_CLOSE || state == TCP_LISTEN) /* it has no connection */
		return 0;
	c = bpf_sk_storage_get(&sockets, sk, 0, 0);
	if (!c) {
		count = count_new;
		c = new_counted(sk, task);
		if (!c && !count && some)
			*some = 1;
		if (c && count && some && *some) {
			count_loss(LOSS_SOCKET_STORAGE);
			count = false;
		}
	}
	if (!c)
		return 0;
	if (scans_recount)
		count_again(c);
	set_owner(c, task);
	take(sk, c, count, false);
	return 0;
}

/* How a scan counts: set before each by user space. Where a scan of all files takes too long it is one of the files
 * of one process at a time, which recounts no storages. */
#define COUNTS_KNOWN 1
#define COUNTS_NEW 2
#define RECOUNTS 4

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
} scan_counts SEC(".maps");

SEC("iter/task_file")
int on_scan(struct bpf_iter__task_file *ctx)
{
	const u32 first = 0;
	u64 *how = bpf_map_lookup_elem(&scan_counts, &first);

	if (!how)
		return 0;
	if (scans_recount && *how & RECOUNTS)
		RECOUNT(ctx, (struct counted *)NULL, !ctx->task);
	return scan(ctx, *how & COUNTS_KNOWN, *how & COUNTS_NEW);
}

/* A table of open files; processes may share one. */
struct file_table {
	u64 files; /* its address, which stands for it */
	u64 party;
	u64 tgid;
};

/* Writes down the tables of all processes. */
SEC("iter/task")
int on_tables(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct file_table table;

	if (!task || task->tgid != task->pid || task->flags & PF_KTHREAD || !watched(task->tgid))
		return 0;
	table.files = (u64)BPF_CORE_READ((struct task_struct___files *)task, files);
	if (!table.files)
		return 0;
	table.party = party_of(task);
	table.tgid = task->tgid;
	bpf_seq_write(ctx->meta->seq, &table, sizeof(table));
	return 0;
}

/* Run by user space over all storages of sockets. */
SEC("iter/bpf_sk_storage_map")
int on_recount(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	struct counted *c = ctx->value;

	RECOUNT(ctx, c, !c);
	return 0;
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(on_state, struct sock *sk, int from, int to)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task_btf();
	struct counted none = {}, *c;

	if (to != TCP_SYN_SENT && to != TCP_FIN_WAIT1 && to != TCP_LAST_ACK && to != TCP_CLOSE)
		return 0;
	if (!is_tcp(sk))
		return 0;
	c = bpf_sk_storage_get(&sockets, sk, 0, 0);
	if (to == TCP_CLOSE) {
		if (c)
			take(sk, c, true, true);
		else if (from == TCP_CLOSE || from == TCP_LISTEN)
			return 0; /* it had no connection */
		else if (some_left_out())
			count_loss(LOSS_SOCKET_STORAGE);
		else
			take(sk, &none, true, true);
		if (c)
			bpf_sk_storage_delete(&sockets, sk);
		return 0;
	}
	/* connect(), close() and shutdown() come here in the caller's own context. */
	if (!c) {
		c = new_counted(sk, task);
		if (c && to != TCP_SYN_SENT && some_left_out()) {
			count_loss(LOSS_SOCKET_STORAGE);
			take(sk, c, false, false);
		}
	}
	if (c)
		set_owner(c, task);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
