// SPDX-License-Identifier: Apache-2.0
// What CUPTI hands over: buffers of activity records, and a callback at each launch.
#include "windows.h"

#include <stdlib.h>

#define BUFFER_BYTES (1u << 20)

struct record *records;
struct launch *launches;
atomic_uint n_records, n_launches, foreign_buffers, lost_buffers;
atomic_uint buffer_busy[MAX_BUFFERS];
static void *buffers[MAX_BUFFERS];

void CUPTIAPI buffer_requested(uint8_t **buffer, size_t *size, size_t *max)
{
	*max = 0;
	*size = BUFFER_BYTES;
	for (unsigned i = 0; i < MAX_BUFFERS; i++) {
		unsigned free_now = 0;
		if (!atomic_compare_exchange_strong(&buffer_busy[i], &free_now, 1))
			continue;
		if (!buffers[i])
			buffers[i] = aligned_alloc(4096, BUFFER_BYTES);
		*buffer = buffers[i];
		return;
	}
	*buffer = NULL;
	*size = 0;
	lost_buffers++;
}

static uint32_t hash(const char *s)
{
	uint32_t h = 2166136261u;
	while (s && *s)
		h = (h ^ (uint8_t)*s++) * 16777619u;
	return h;
}

static void keep_record(const CUpti_Activity *a)
{
	struct record r = {.window = window_now, .kind = a->kind};
	if (a->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL ||
	    a->kind == CUPTI_ACTIVITY_KIND_KERNEL) {
		const CUpti_ActivityKernel9 *k =
			(const void *)a; // offsets agree from CUPTI 12.9 to 13.5
		r.start = k->start, r.end = k->end, r.corr = k->correlationId,
		r.node = k->graphNodeId;
		r.graph = k->graphId, r.stream = k->streamId, r.name = hash(k->name);
	} else if (a->kind == CUPTI_ACTIVITY_KIND_RUNTIME ||
		   a->kind == CUPTI_ACTIVITY_KIND_DRIVER) {
		const CUpti_ActivityAPI *k = (const void *)a;
		r.start = k->start, r.end = k->end, r.corr = k->correlationId, r.name = k->cbid;
	} else if (a->kind == CUPTI_ACTIVITY_KIND_GRAPH_TRACE) {
		const CUpti_ActivityGraphTrace *k = (const void *)a;
		r.start = k->start, r.end = k->end, r.corr = k->correlationId, r.graph = k->graphId;
	} else {
		return;
	}
	unsigned i = n_records++;
	if (i < MAX_RECORDS)
		records[i] = r;
	if (r.window < MAX_WINDOWS)
		windows[r.window].records++;
}

void CUPTIAPI buffer_completed(CUcontext c, uint32_t stream, uint8_t *buffer, size_t size,
			       size_t valid)
{
	(void)size;
	unsigned mine = MAX_BUFFERS;
	for (unsigned i = 0; i < MAX_BUFFERS; i++)
		if (buffers[i] == buffer)
			mine = i;
	if (mine ==
	    MAX_BUFFERS) { // somebody else's, handed to us because the callbacks changed hands: not ours to free
		foreign_buffers++;
		return;
	}
	CUpti_Activity *a = NULL;
	while (valid && p_cuptiActivityGetNextRecord(buffer, valid, &a) == CUPTI_SUCCESS)
		keep_record(a);
	size_t dropped = 0;
	if (p_cuptiActivityGetNumDroppedRecords(c, stream, &dropped) == CUPTI_SUCCESS && dropped)
		windows[window_now % MAX_WINDOWS].dropped += dropped;
	buffer_busy[mine] = 0;
}

void CUPTIAPI on_call(void *user, CUpti_CallbackDomain d, CUpti_CallbackId id, const void *data)
{
	(void)user;
	(void)d;
	const CUpti_CallbackData *c = data;
	if (c->callbackSite == CUPTI_API_EXIT && finalize_armed) {
		int armed = 1;
		if (atomic_compare_exchange_strong(&finalize_armed, &armed, 0)) {
			finalize_result |= p_cuptiFinalize();
			finalized = 1;
		}
		return;
	}
	if (id == CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize ||
	    id == CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize)
		return;
	if (c->callbackSite != CUPTI_API_ENTER)
		return;
	unsigned i = n_launches++;
	if (i < MAX_LAUNCHES)
		launches[i] = (struct launch){now_ns(), c->correlationId, window_now, id};
}
