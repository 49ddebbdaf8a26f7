/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is used of CUPTI: functions, and where fields of its records lie. These offsets are the same from
 * CUPTI 12.9 to 13.5; a build is used only after it was tried (src/sonde/attach/cupti_builds.toml).
 *
 * A field has its name of CUPTI (CUpti_ActivityKernel9 and others) where nothing else is noted. To *switch* a
 * call or kind of record on is cuptiActivityEnable and its kin. The *head* of a trace is struct inject_trace
 * (abi/inject.h), which the agent reads first.
 */
#ifndef SONDE_CUPTI_H
#define SONDE_CUPTI_H

#include "driver.h"
#include "internal.h"

#pragma GCC visibility push(hidden)

#define CUPTI "libcupti.so"

typedef int cupti_result;
typedef void (*cupti_buffer_requested)(uint8_t **buffer, size_t *size, size_t *most_records);
typedef void (*cupti_buffer_completed)(cu_context context, uint32_t stream, uint8_t *buffer,
				       size_t size, size_t valid);

#define CUPTI_NO_MORE_RECORDS 12
#define CUPTI_NOT_SWITCHED 1000 /* ours: none of its calls could be switched on */
#define CUPTI_NO_PRIVILEGES 35
#define CUPTI_SUBSCRIBED_BY_ANOTHER 39

/* CUpti_ActivityKind, stable since CUDA 4 */
enum cupti_kind {
	CUPTI_MEMCPY = 1,
	CUPTI_MEMSET = 2,
	CUPTI_KERNEL = 3, /* serializes kernels: never switched on here; its record is alike */
	CUPTI_DRIVER = 4,
	CUPTI_RUNTIME = 5,
	CUPTI_CONCURRENT_KERNEL = 10,
	CUPTI_MEMCPY_PEER = 22,
};
enum cupti_domain { CUPTI_DOMAIN_DRIVER = 1, CUPTI_DOMAIN_RUNTIME = 2 };
#define CUPTI_THREAD_ID_SYSTEM 1
#define CUPTI_DRIVER_CALLS 1024u /* more ids than the driver has calls */

#define CUPTI_FUNCTIONS(X)                                                                         \
	X(cuptiGetVersion, (uint32_t *))                                                           \
	X(cuptiActivityRegisterCallbacks, (cupti_buffer_requested, cupti_buffer_completed))        \
	X(cuptiActivityEnable, (int))                                                              \
	X(cuptiActivityDisable, (int))                                                             \
	X(cuptiActivityFlushAll, (uint32_t))                                                       \
	X(cuptiActivityGetNextRecord, (uint8_t *, size_t, uint8_t **))                             \
	X(cuptiActivityGetNumDroppedRecords, (cu_context, uint32_t, size_t *))                     \
	X(cuptiGetTimestamp, (uint64_t *))                                                         \
	X(cuptiGetThreadIdType, (int *))                                                           \
	X(cuptiSetThreadIdType, (int))                                                             \
	X(cuptiGetCallbackName, (int, uint32_t, const char **))                                    \
	X(cuptiActivityEnableDriverApi, (uint32_t, uint8_t))

struct cupti {
#define CUPTI_FIELD(name, arguments) cupti_result(*name) arguments;
	CUPTI_FUNCTIONS(CUPTI_FIELD)
#undef CUPTI_FIELD
};

struct __attribute__((packed)) cupti_kernel {
	uint32_t kind;
	uint16_t cache, registers;
	uint8_t unused_1[8];
	uint64_t start, end;
	uint64_t completed; /* not read */
	uint32_t device, context, stream;
	uint32_t grid[3], block[3];
	uint32_t static_shared, dynamic_shared;
	uint8_t unused_2[8];
	uint32_t correlation;
	uint64_t number; /* gridId */
	const char *name;
	uint8_t unused_3[32];
	uint64_t node; /* graphNodeId */
	uint8_t unused_4[4];
	uint32_t graph; /* graphId */
};

/* A copy or a set: of both these fields lie at the same offsets. */
struct __attribute__((packed)) cupti_transfer {
	uint32_t kind;
	uint8_t direction, from, to, flags; /* copyKind, srcKind, dstKind; of a set: its value */
	uint64_t bytes, start, end;
	uint32_t device, context, stream, correlation;
	uint8_t unused[12];
	uint64_t node;
	uint32_t graph;
};

struct __attribute__((packed)) cupti_peer_copy {
	uint32_t kind;
	uint8_t direction, from, to, flags;
	uint64_t bytes, start, end;
	uint32_t device, context, stream;
	uint8_t unused_1[16];
	uint32_t correlation;
	uint8_t unused_2[12];
	uint64_t node;
	uint32_t graph;
};

struct __attribute__((packed)) cupti_call {
	uint32_t kind, id;
	uint64_t start, end;
	uint32_t pid, tid, correlation, result;
};

_Static_assert(offsetof(struct cupti_kernel, correlation) == 92, "as CUPTI has it");
_Static_assert(offsetof(struct cupti_kernel, name) == 104, "as CUPTI has it");
_Static_assert(offsetof(struct cupti_kernel, node) == 144, "as CUPTI has it");
_Static_assert(offsetof(struct cupti_kernel, graph) == 156, "as CUPTI has it");
_Static_assert(offsetof(struct cupti_transfer, correlation) == 44, "as CUPTI has it");
_Static_assert(offsetof(struct cupti_transfer, node) == 60, "as CUPTI has it");
_Static_assert(offsetof(struct cupti_peer_copy, correlation) == 60, "as CUPTI has it");
_Static_assert(offsetof(struct cupti_peer_copy, node) == 76, "as CUPTI has it");
_Static_assert(offsetof(struct cupti_call, tid) == 28, "as CUPTI has it");

/* ---- trace_records.c: what CUPTI hands over, and where it goes ---- */

/* Make the memory for the records of one trace. False: there is none. */
bool records_begin(const struct cupti *cupti, uint32_t window);
/* The head of that memory. */
struct inject_trace *records_head(void);
/* `on`: keep records from now on. Else keep no more, and wait until the one that is being kept is done: for 1 s
 * at most, as CUPTI may hang. */
void records_keep(bool on);
/* How many buffers CUPTI has not given back. */
unsigned records_held(void);
/* The trace is complete: let the agent see it. */
void records_publish(void);
/* Give the memory back, unless records are kept, or still being kept: then a later call does. */
void records_forget(void);
/* In a forked child. */
void records_forget_in_child(void);
/* The two callbacks of cuptiActivityRegisterCallbacks: CUPTI asks for an empty buffer, and hands a full one over. */
void cupti_wants_buffer(uint8_t **buffer, size_t *size, size_t *most_records);
void cupti_gives_buffer(cu_context context, uint32_t stream, uint8_t *buffer, size_t size,
			size_t valid);

/* ---- profilers.c: other users of CUPTI in this process ---- */

/* Does one of them trace, or did one call CUPTI just now, so that it may begin to? */
bool profilers_trace(void);
/* Since our hooks are in, one was seen to switch a kind of record on or off: so whether they trace is known. */
bool profilers_are_known(void);
/* Somebody else has switched this kind on for all contexts. */
bool profilers_have_on(int kind);
/* What somebody else gave to cuptiActivityRegisterCallbacks last, or false. */
bool profilers_callbacks(cupti_buffer_requested *requested, cupti_buffer_completed *completed);

#pragma GCC visibility pop
#endif
