// SPDX-License-Identifier: Apache-2.0
// CUPTI's buffers, and its records as the agent reads them. CUPTI calls the callbacks here in threads of its, of ours
// and of the program.
#include "cupti.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BUFFERS 64u
#define BUFFER_BYTES (2u << 20)
#define CACHED 4096u	  /* names of kernels, a power of two */
#define CALLS 2048u	  /* ids of calls in each domain; others have no name */
#define FORGET_TURNS 1000 /* tries to free the memory of the trace before */

static struct {
	const struct cupti *cupti;
	char *memory; // the trace's, as the agent sees it
	int descriptor;
	char *buffers;
	_Atomic uint64_t next;		 // index of the next record
	_Atomic uint32_t keeping;	 // how many callbacks store records now
	_Atomic uint8_t is_out[BUFFERS]; // CUPTI has it
	struct {
		const char *text; // CUPTI's pointer
		uint32_t name;	  // its offset in the shared names
	} kernels[CACHED];
	_Atomic uint32_t names_lock;
	_Atomic uint32_t calls[2][CALLS];
} trace;

struct inject_trace *records_head(void)
{
	return (void *)trace.memory;
}

void records_forget(void)
{
	// A callback may still store records: then a later call frees the memory.
	if (atomic_load(&sampling->traced) || atomic_load(&trace.keeping) || !trace.memory)
		return;
	munmap(trace.memory, INJECT_TRACE_BYTES);
	syscall(SYS_close, trace.descriptor);
	trace.memory = NULL;
}

// The trace's memory is not mapped in a child (MADV_DONTFORK), and its addresses may belong to another mapping by now.
// The child's CUPTI may hold buffers and write to them: so they stay mapped, and a trace of the child makes others.
// Offsets of names of calls (`calls`) stay, though the child's names are other memory: CUDA does not work in a child
// whose parent has used it.
void records_forget_in_child(void)
{
	atomic_store(&sampling->traced, 0);
	atomic_store(&trace.keeping, 0);
	atomic_store(&trace.names_lock, 0);
	if (trace.memory)
		syscall(SYS_close, trace.descriptor);
	trace.memory = NULL;
	trace.buffers = NULL;
	for (unsigned k = 0; k < BUFFERS; k++)
		atomic_store(&trace.is_out[k], 0);
}

bool records_begin(const struct cupti *cupti, uint32_t window)
{
	for (int i = 0; i < FORGET_TURNS; i++) {
		records_forget();
		if (!trace.memory)
			break;
		short_nap(i);
	}
	if (trace.memory)
		return false;
	trace.cupti = cupti;
	if (!trace.buffers) {
		void *at = mmap(NULL, (size_t)BUFFERS * BUFFER_BYTES, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (at == MAP_FAILED)
			return false;
		madvise(at, (size_t)BUFFERS * BUFFER_BYTES, MADV_WIPEONFORK);
		trace.buffers = at;
	}
	if (!(trace.memory =
		      shared_memory(INJECT_TRACE_MEMFD, INJECT_TRACE_BYTES, &trace.descriptor)))
		return false;
	// A child that ran no fork handlers (of clone(2)) keeps no records either: `traced` is in memory that a
	// fork wipes.
	madvise(trace.memory, INJECT_TRACE_BYTES, MADV_DONTFORK);
	struct inject_trace *head = records_head();
	head->abi = INJECT_ABI;
	head->pid = (uint32_t)getpid();
	head->window = window;
	// A pointer may be that of a module that was unloaded since the trace before. Where that happens during a
	// trace, and another module's name comes to lie there, kernels of that module get the old name.
	memset(trace.kernels, 0, sizeof trace.kernels);
	atomic_store(&trace.next, 0);
	return true;
}

void records_keep(bool on)
{
	atomic_store(&sampling->traced, on);
	if (on)
		return;
	// Callbacks that take longer keep their buffers, which are out: the loop below skips those.
	uint64_t until = now_ns() + 1000000000u;
	for (int i = 0; atomic_load(&trace.keeping) && now_ns() < until; i++)
		short_nap(i);
	for (unsigned k = 0; k < BUFFERS; k++) {
		if (atomic_exchange(&trace.is_out[k], 1)) // so that CUPTI does not get it
			continue;
		madvise(trace.buffers + (size_t)k * BUFFER_BYTES, BUFFER_BYTES, MADV_DONTNEED);
		atomic_store(&trace.is_out[k], 0);
	}
}

unsigned records_held(void)
{
	unsigned held = 0;
	for (unsigned k = 0; k < BUFFERS; k++)
		held += atomic_load(&trace.is_out[k]);
	return held;
}

void records_publish(void)
{
	__atomic_store_n(&records_head()->magic, INJECT_TRACE_MAGIC, __ATOMIC_RELEASE);
}

#define COUNT_HERE(field, n) __atomic_fetch_add(&records_head()->field, (n), __ATOMIC_RELAXED)

static bool begin_keeping(void)
{
	atomic_fetch_add(&trace.keeping, 1);
	if (atomic_load(&sampling->traced))
		return true;
	atomic_fetch_sub(&trace.keeping, 1);
	return false;
}

static void end_keeping(void)
{
	atomic_fetch_sub(&trace.keeping, 1);
}

void cupti_wants_buffer(uint8_t **buffer, size_t *size, size_t *most_records)
{
	*buffer = NULL;
	*size = 0;
	*most_records = 0;
	for (unsigned k = 0; k < BUFFERS && trace.buffers; k++) {
		if (atomic_exchange(&trace.is_out[k], 1))
			continue;
		*buffer = (uint8_t *)trace.buffers + (size_t)k * BUFFER_BYTES;
		*size = BUFFER_BYTES;
		return;
	}
	if (begin_keeping()) {
		COUNT_HERE(no_buffer, 1);
		end_keeping();
	}
}

static uint32_t kernel_name(const char *text)
{
	if (!text)
		return 0;
	unsigned slot = (uint32_t)((uintptr_t)text >> 3) * 2654435761u >> 20 & (CACHED - 1);
	// A seqlock: the name belongs to the text if the text is the same before and after.
	const char *known = __atomic_load_n(&trace.kernels[slot].text, __ATOMIC_ACQUIRE);
	uint32_t name = __atomic_load_n(&trace.kernels[slot].name, __ATOMIC_ACQUIRE);
	if (known == text && __atomic_load_n(&trace.kernels[slot].text, __ATOMIC_ACQUIRE) == text)
		return name;
	name = shared_name(text);
	// Several threads hand buffers over; while one writes an entry, the others skip that.
	if (!atomic_exchange(&trace.names_lock, 1)) {
		__atomic_store_n(&trace.kernels[slot].text, NULL, __ATOMIC_RELEASE);
		__atomic_store_n(&trace.kernels[slot].name, name, __ATOMIC_RELEASE);
		__atomic_store_n(&trace.kernels[slot].text, text, __ATOMIC_RELEASE);
		atomic_store(&trace.names_lock, 0);
	}
	return name;
}

static uint32_t call_name(enum cupti_domain domain, uint32_t id)
{
	if (id >= CALLS)
		return 0;
	_Atomic uint32_t *known = &trace.calls[domain == CUPTI_DOMAIN_RUNTIME][id];
	uint32_t name = atomic_load_explicit(known, memory_order_relaxed);
	const char *text = NULL;
	if (!name && !trace.cupti->cuptiGetCallbackName(domain, id, &text)) {
		name = shared_name(text);
		atomic_store_explicit(known, name, memory_order_relaxed);
	}
	return name;
}

static void keep_kernel(const struct cupti_kernel *k, struct inject_traced *to)
{
	to->kind = INJECT_TRACED_KERNEL;
	to->start_ns = k->start, to->end_ns = k->end;
	to->correlation = k->correlation;
	to->name = kernel_name(k->name);
	to->device = k->device, to->stream = k->stream;
	to->graph = k->graph, to->node = k->node;
	to->registers = k->registers;
	to->shared_bytes = k->static_shared + k->dynamic_shared;
	for (int i = 0; i < 3; i++)
		to->grid[i] = k->grid[i], to->block[i] = (uint16_t)k->block[i];
}

static void keep_transfer(const struct cupti_transfer *k, struct inject_traced *to)
{
	to->kind = k->kind == CUPTI_MEMSET ? INJECT_TRACED_SET : INJECT_TRACED_COPY;
	to->start_ns = k->start, to->end_ns = k->end;
	to->correlation = k->correlation;
	to->bytes = k->bytes;
	to->device = k->device, to->stream = k->stream;
	to->graph = k->graph, to->node = k->node;
	if (k->kind == CUPTI_MEMSET)
		return; // where a copy has the next two, CUPTI's record of a memset has its value
	to->direction = k->direction;
	to->memory = (uint8_t)((k->from & 15) | k->to << 4);
}

static void keep_peer_copy(const struct cupti_peer_copy *k, struct inject_traced *to)
{
	to->kind = INJECT_TRACED_COPY;
	to->start_ns = k->start, to->end_ns = k->end;
	to->correlation = k->correlation;
	to->bytes = k->bytes;
	to->device = k->device, to->stream = k->stream;
	to->graph = k->graph, to->node = k->node;
	to->direction = k->direction;
	to->memory = (uint8_t)((k->from & 15) | k->to << 4);
}

static void keep_call(const struct cupti_call *k, struct inject_traced *to)
{
	bool is_runtime = k->kind == CUPTI_RUNTIME;
	to->kind = is_runtime ? INJECT_TRACED_RUNTIME : INJECT_TRACED_DRIVER;
	to->start_ns = k->start, to->end_ns = k->end;
	to->correlation = k->correlation;
	to->name = call_name(is_runtime ? CUPTI_DOMAIN_RUNTIME : CUPTI_DOMAIN_DRIVER, k->id);
	to->tid = k->tid;
	to->result = k->result;
}

static void keep(const uint8_t *record)
{
	struct inject_traced one = {0};
	switch (*(const uint32_t *)record) {
	case CUPTI_KERNEL:
	case CUPTI_CONCURRENT_KERNEL:
		keep_kernel((const void *)record, &one);
		break;
	case CUPTI_MEMCPY:
	case CUPTI_MEMSET:
		keep_transfer((const void *)record, &one);
		break;
	case CUPTI_MEMCPY_PEER:
		keep_peer_copy((const void *)record, &one);
		break;
	case CUPTI_RUNTIME:
	case CUPTI_DRIVER:
		keep_call((const void *)record, &one);
		break;
	default:
		COUNT_HERE(unknown, 1);
		return;
	}
	uint64_t at = atomic_fetch_add(&trace.next, 1);
	if (at >= INJECT_TRACE_RECORDS) {
		COUNT_HERE(left_out, 1);
		return;
	}
	struct inject_traced *records = (void *)(trace.memory + INJECT_TRACE_AT);
	records[at] = one;
	COUNT_HERE(records, 1);
}

void cupti_gives_buffer(cu_context context, uint32_t stream, uint8_t *buffer, size_t size,
			size_t valid)
{
	(void)size;
	uintptr_t offset = (uintptr_t)buffer - (uintptr_t)trace.buffers;
	bool is_ours = trace.buffers && offset < (size_t)BUFFERS * BUFFER_BYTES;
	if (begin_keeping()) {
		uint8_t *record = NULL;
		size_t dropped = 0;
		if (is_ours && valid <= BUFFER_BYTES)
			while (valid &&
			       !trace.cupti->cuptiActivityGetNextRecord(buffer, valid, &record)) {
				// The rest of the buffer is lost, however much: counted as one.
				if (!atomic_load(&sampling->traced)) {
					COUNT_HERE(left_out, 1);
					break;
				}
				keep(record);
			}
		if (!trace.cupti->cuptiActivityGetNumDroppedRecords(context, stream, &dropped))
			COUNT_HERE(dropped, dropped);
		COUNT_HERE(foreign, !is_ours);
		end_keeping();
	}
	if (is_ours)
		atomic_store(&trace.is_out[offset / BUFFER_BYTES], 0);
}
