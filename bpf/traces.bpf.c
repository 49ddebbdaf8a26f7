// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Which traced request a thread works on: the W3C header `traceparent` of an HTTP/1 request that it
 * receives from a TCP socket, from then until the first byte of the answer is sent, or the socket closed.
 *
 * A thread with several unanswered requests (an event loop) works on none of them for sure: it counts for
 * none until all are answered. What is encrypted, HTTP/2, or handed to another thread is not seen.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#define SONDE_MAX_STACKS 1 /* takes none */
#include "stack.h"
#include "task.h"
#include "host_types.h"
#include "party.h"
#include "trace_context.h"

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6
/* enum in net/tcp_states.h */
#define TCP_FIN_WAIT1 4
#define TCP_CLOSE 7
#define TCP_LAST_ACK 9
#define MSG_PEEK 2
#define REQUESTS_OF_ONE (MOST_REQUESTS / 4) /* party; the machine's root may have all */
#define TRIES 8				    /* to change a context that other CPUs change, too */
#define HEAD_BYTES 4096			    /* of a request, that are searched for the header */
#define STEP 64
#define NAME_BYTES 13	   /* "\ntraceparent:" */
#define WINDOW (STEP + 16) /* a step, and what a name at its end needs */
#define VALUE_BYTES 56	   /* "00-", 32 digits, "-", 16 digits, "-", 2 digits */
#define METHOD_BYTES 8	   /* a method, a space and more: the longest is CONNECT */

/* The system calls that receive into a buffer of user memory: read, recvfrom, recvmsg. */
#if defined(__TARGET_ARCH_x86)
#define CALL_READ 0
#define CALL_RECVFROM 45
#define CALL_RECVMSG 47
#define CALL_OF(regs) ((long)(regs)->orig_ax)
#define BUFFER_OF(regs) ((regs)->si)
#elif defined(__TARGET_ARCH_arm64)
#define CALL_READ 63
#define CALL_RECVFROM 207
#define CALL_RECVMSG 212
#define CALL_OF(regs) ((long)(regs)->syscallno)
#define BUFFER_OF(regs) ((regs)->regs[1])
#endif

/* User space's struct msghdr and struct iovec, as far as they are read. */
struct user_msghdr {
	u64 name;
	u64 name_len;
	u64 iov;
	u64 iov_len;
};

struct user_iovec {
	u64 base;
	u64 len;
};

/* A request that came by a socket and is not answered. */
struct received {
	u64 born_ns; /* when the thread began that received it: another may get its number */
	u64 party;   /* whose that thread is (party.h) */
	u32 tid;
	u32 unused;
};

/*
 * By the address of the socket. Made when a request is received, taken away when it is answered or the
 * socket closed: so how many a party has is known at any time, and no storage of sockets is needed, of
 * which anybody can have a million.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MOST_REQUESTS);
	__type(key, u64);
	__type(value, struct received);
} requests SEC(".maps");

/* How many of these a party has. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 2048);
	__type(key, u64);
	__type(value, s64);
} request_parties SEC(".maps");

/* Puts the layout of the ring's records into the object's BTF. */
const struct traced_sample *traced_sample_layout __attribute__((unused));

struct search {
	const char *at; /* of user memory */
	u32 size;
	u32 found; /* offset behind the header's name; 0: not found */
};

/* Looks for the header in one step of a request's head. */
static long search_step(u32 i, void *arg)
{
	struct search *s = arg;
	char window[WINDOW] = {};
	u32 begin = i * STEP;
	u32 size;

	if (begin >= s->size)
		return 1;
	size = s->size - begin;
	if (size > WINDOW)
		size = WINDOW;
	if (!size || bpf_probe_read_user(window, size, s->at + begin))
		return 1;
	for (u32 k = 0; k < STEP; k++) {
		if (window[k] != '\n')
			continue;
		if (window[k + 1] == '\r' && window[k + 2] == '\n')
			return 1; /* the end of the head */
		if ((window[k + 1] | 32) == 't' && (window[k + 2] | 32) == 'r' &&
		    (window[k + 3] | 32) == 'a' && (window[k + 4] | 32) == 'c' &&
		    (window[k + 5] | 32) == 'e' && (window[k + 6] | 32) == 'p' &&
		    (window[k + 7] | 32) == 'a' && (window[k + 8] | 32) == 'r' &&
		    (window[k + 9] | 32) == 'e' && (window[k + 10] | 32) == 'n' &&
		    (window[k + 11] | 32) == 't' && window[k + 12] == ':') {
			s->found = begin + k + NAME_BYTES;
			return 1;
		}
	}
	return 0;
}

/* Up to 16 hexadecimal digits, in small letters as the header has them, as a number; false for anything else. */
static __always_inline bool hexadecimal(const char *text, u64 *number)
{
	u64 found = 0;

	for (u32 i = 0; i < 16; i++) {
		char c = text[i];

		if (c >= '0' && c <= '9')
			found = found << 4 | (u64)(c - '0');
		else if (c >= 'a' && c <= 'f')
			found = found << 4 | (u64)(c - 'a' + 10);
		else
			return false;
	}
	*number = found;
	return true;
}

/* Reads the header's value into `c`. False where it has none that counts. */
static __always_inline bool read_value(const struct search *s, struct trace_context *c)
{
	char value[VALUE_BYTES] = {};
	u32 at = s->found;

	if (bpf_probe_read_user(value, 1, s->at + at))
		return false;
	if (value[0] == ' ')
		at++;
	if (at + VALUE_BYTES - 1 > s->size)
		return false;
	if (bpf_probe_read_user(value, VALUE_BYTES - 1, s->at + at))
		return false;
	if (value[2] != '-' || value[35] != '-' || value[52] != '-' ||
	    (value[0] == 'f' && value[1] == 'f'))
		return false;
	return hexadecimal(value + 3, &c->trace_hi) && hexadecimal(value + 19, &c->trace_lo) &&
	       hexadecimal(value + 36, &c->span_id) && (c->trace_hi | c->trace_lo) && c->span_id;
}

/* Whether a request of HTTP/1 begins here: a method in capitals and a space. */
static __always_inline bool begins_request(const char *at)
{
	char method[METHOD_BYTES] = {};

	if (bpf_probe_read_user(method, METHOD_BYTES, at))
		return false;
	for (u32 i = 0; i < METHOD_BYTES; i++) {
		if (method[i] == ' ')
			return i >= 3;
		if (method[i] < 'A' || method[i] > 'Z')
			return false;
	}
	return false;
}

/*
 * Where the system call that the current thread is in receives to, and how much fits there at most. From its
 * registers: the kernel's own description of the buffer differs between versions. NULL for any other call.
 */
static __always_inline const char *receives_to(struct task_struct *task, u32 *size)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
	struct user_msghdr message = {};
	struct user_iovec first = {};
	u64 at;

	if (!regs)
		return NULL;
	at = BUFFER_OF(regs);
	switch (CALL_OF(regs)) {
	case CALL_READ:
	case CALL_RECVFROM:
		return (const char *)at;
	case CALL_RECVMSG:
		if (bpf_probe_read_user(&message, sizeof(message), (const void *)at) ||
		    bpf_probe_read_user(&first, sizeof(first), (const void *)message.iov))
			return NULL;
		if (first.len < *size)
			*size = first.len;
		return (const char *)first.base;
	}
	return NULL;
}

static __always_inline bool is_tcp(struct sock *sk)
{
	u16 family = sk->__sk_common.skc_family;

	return (family == AF_INET || family == AF_INET6) && sk->sk_protocol == IPPROTO_TCP;
}

static __always_inline s64 *requests_of(u64 party)
{
	const s64 none = 0;
	s64 *it = bpf_map_lookup_elem(&request_parties, &party);

	if (it)
		return it;
	bpf_map_update_elem(&request_parties, &party, &none, BPF_NOEXIST);
	return bpf_map_lookup_elem(&request_parties, &party);
}

/* A thread received a request: `first` is its context where it has no other. False where there is no room. */
static __always_inline bool begin_in_context(u32 tid, const struct trace_context *first,
					     bool *is_alone)
{
	struct trace_context *c;
	u64 state;

	for (u32 i = 0; i < TRIES; i++) {
		c = bpf_map_lookup_elem(&trace_contexts, &tid);
		state = c ? c->state : 0;
		*is_alone = !c || (state ^ first->state) > (CONTEXT_SEVERAL | CONTEXT_REQUESTS);
		if (*is_alone) /* there is none, or that of a thread that has ended */
			return !bpf_map_update_elem(&trace_contexts, &tid, first, BPF_ANY);
		if (state & CONTEXT_REQUESTS && /* else another CPU is about to take it away */
		    __sync_val_compare_and_swap(&c->state, state, (state + 1) | CONTEXT_SEVERAL) ==
			    state)
			return true;
	}
	return false;
}

/* A request of a thread has ended; with its last one the context is taken away. */
static __noinline int end_in_context(u32 tid, u64 born_ns)
{
	struct trace_context *c;
	u64 state;

	for (u32 i = 0; i < TRIES; i++) {
		c = bpf_map_lookup_elem(&trace_contexts, &tid);
		state = c ? c->state : 0;
		if (!(state & CONTEXT_REQUESTS) ||
		    (state ^ CONTEXT_OF(born_ns)) > (CONTEXT_SEVERAL | CONTEXT_REQUESTS))
			return 0;
		if (__sync_val_compare_and_swap(&c->state, state, state - 1) != state)
			continue;
		if ((state & CONTEXT_REQUESTS) == 1)
			bpf_map_delete_elem(&trace_contexts, &tid);
		return 0;
	}
	/* Many CPUs end requests of this thread: without a context none of them counts for too long. */
	bpf_map_delete_elem(&trace_contexts, &tid);
	count_loss(LOSS_TRACED);
	return 0;
}

/* The request that came by a socket is answered, its client gone, or its thread or another has the next one. */
static __noinline int end_request(u64 sock)
{
	struct received *known = bpf_map_lookup_elem(&requests, &sock);
	struct received request;
	s64 *of_party;

	if (!known)
		return 0;
	request = *known;
	if (bpf_map_delete_elem(&requests, &sock))
		return 0; /* another CPU did */
	of_party = bpf_map_lookup_elem(&request_parties, &request.party);
	if (of_party)
		__sync_fetch_and_add(of_party, -1);
	return end_in_context(request.tid, request.born_ns);
}

/*
 * Keeps that `tid`, which began at `born_ns`, received a request by a socket. First in the thread's context, so
 * that whichever CPU ends the request finds it counted there: contexts are no more than requests, with their
 * shares, and none outlasts its requests. False where there is no room.
 */
static __always_inline bool keep_request(u64 sock, u32 tid, u64 born_ns,
					 const struct trace_context *context, bool *is_alone)
{
	const struct received it = {.born_ns = born_ns, .party = context->party, .tid = tid};
	s64 *of_party;

	end_request(sock);
	of_party = it.party ? requests_of(it.party) : NULL;
	if (!begin_in_context(tid, context, is_alone))
		return false;
	if ((it.party && (!of_party || *of_party >= REQUESTS_OF_ONE)) ||
	    bpf_map_update_elem(&requests, &sock, &it, BPF_NOEXIST)) {
		end_in_context(tid, born_ns);
		return false;
	}
	if (of_party)
		__sync_fetch_and_add(of_party, 1);
	return true;
}

SEC("tp_btf/sock_recv_length")
int BPF_PROG(on_received, struct sock *sk, int result, int flags)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct trace_context context = {};
	struct search search = {};
	u64 born_ns = task->start_boottime, sock = (u64)sk;
	u32 tid = task->pid;
	bool is_alone = true;

	if (result < METHOD_BYTES || flags & MSG_PEEK || !watched(task->tgid) ||
	    !has_user_frames(task) || !is_tcp(sk))
		return 0;
	search.size = result;
	search.at = receives_to(task, &search.size);
	if (!search.at || search.size < METHOD_BYTES || !begins_request(search.at))
		return 0;
	if (search.size > HEAD_BYTES)
		search.size = HEAD_BYTES;
	bpf_loop(HEAD_BYTES / STEP, search_step, &search, 0);
	if (!search.found || !read_value(&search, &context))
		context.trace_hi = context.trace_lo = context.span_id = 0;
	context.state = CONTEXT_OF(born_ns) | 1;
	context.party = party_of(task);
	if (!keep_request(sock, tid, born_ns, &context, &is_alone))
		count_loss(LOSS_TRACED);
	else if (!is_alone && context.trace_hi | context.trace_lo)
		count_loss(LOSS_SEVERAL_REQUESTS);
	/* Of a socket that is closed already nothing more is seen: its client may have reset it. */
	if (sk->__sk_common.skc_state == TCP_CLOSE)
		end_request(sock);
	return 0;
}

SEC("tp_btf/sock_send_length")
int BPF_PROG(on_sent, struct sock *sk, int result, int flags)
{
	if (result > 0)
		end_request((u64)sk);
	return 0;
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(on_state, struct sock *sk, int from, int to)
{
	if (to == TCP_CLOSE || to == TCP_FIN_WAIT1 || to == TCP_LAST_ACK)
		end_request((u64)sk);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
