// SPDX-License-Identifier: Apache-2.0
// What the library's files share. Nothing but ground_* and InitializeInjection is visible outside.
#pragma once
#define _GNU_SOURCE
#include <cupti.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define MAX_RECORDS (6u << 20)
#define MAX_LAUNCHES (4u << 20)
#define MAX_WINDOWS 512
#define MAX_CALLS 8192
#define MAX_BUFFERS 512

struct record { // little endian, read by traces.py
	uint64_t start, end, node;
	uint32_t corr, window, graph, name, stream, kind;
};
struct launch {
	uint64_t t, corr;
	uint32_t window, cbid;
};
struct window { // times: CLOCK_MONOTONIC ns; *_dev: CUPTI's clock
	uint64_t open0, open1, close0, close1, flushed, open_dev, open_mono, close_dev, close_mono;
	uint32_t records, result, cut, dropped;
};
struct call {
	uint64_t t;
	char name[40];
	int64_t a, result;
};

#pragma GCC visibility push(hidden) // the host must not see or replace these

static inline uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

// cupti.c: CUPTI, by address
// clang-format off
#define FUNCTIONS(X) \
	X(cuptiActivityRegisterCallbacks) X(cuptiActivityEnable) \
	X(cuptiActivityDisable) X(cuptiActivityFlushAll) \
	X(cuptiActivityGetNextRecord) X(cuptiActivityGetNumDroppedRecords) \
	X(cuptiGetTimestamp) X(cuptiFinalize) \
	X(cuptiGetVersion) X(cuptiSubscribe) \
	X(cuptiUnsubscribe) X(cuptiEnableCallback)
// clang-format on
#define DECLARE(f) extern __typeof__(f) *p_##f;
FUNCTIONS(DECLARE)
extern char what_loaded[512];
extern double init_ms[4];
extern uint32_t version;
int find_loaded(struct dl_phdr_info *i, size_t n, void *to);
void do_init(const char *spec, bool only_load);

// records.c: what CUPTI hands over
extern struct record *records;
extern struct launch *launches;
extern atomic_uint n_records, n_launches, foreign_buffers, lost_buffers;
extern atomic_uint buffer_busy[MAX_BUFFERS];
void CUPTIAPI buffer_requested(uint8_t **buffer, size_t *size, size_t *max);
void CUPTIAPI buffer_completed(CUcontext c, uint32_t stream, uint8_t *buffer, size_t size,
			       size_t valid);
void CUPTIAPI on_call(void *user, CUpti_CallbackDomain d, CUpti_CallbackId id, const void *data);

// control.c: opening and closing windows, finalizing
extern struct window windows[MAX_WINDOWS];
extern unsigned n_windows;
extern atomic_uint window_now;
extern pthread_mutex_t owner;
extern bool window_open, may_yield;
extern const char *kinds, *flags;
extern atomic_int finalize_armed, finalized;
extern unsigned finalizes, finalize_missed;
extern int finalize_result;
void open_window(unsigned w);
void close_window(unsigned w, bool forced);
void do_windows(const char *k, double on, double off, int n, const char *f);
void finalize_at_sync(void);

// others.c: other users of CUPTI
extern struct call calls[MAX_CALLS];
extern atomic_uint n_calls;
extern atomic_bool foreign_active;
extern atomic_ullong foreign_last;
extern unsigned yields;
void do_watch(void);

// hook.c: the launch hook
extern atomic_ullong hook_head;

// imports.c: import tables
struct patch {
	const char *name;
	void *ours, **real;
};
extern unsigned patched_slots;
int patch_object(struct dl_phdr_info *i, size_t size, void *data);

#pragma GCC visibility pop

void ground_hook(int level);
