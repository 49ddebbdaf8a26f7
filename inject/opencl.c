// SPDX-License-Identifier: Apache-2.0
// OpenCL commands, some of them timed by the profiling information of their events.
//
// A queue must have been made with profiling for that: our hooks request it for every queue that is made while they
// are armed. Commands in older queues are counted as lost. We are called through pointer slots of the program that
// lead to functions of the ICD loader (libOpenCL), or by that loader itself (opencl_layer.c).
#include "internal.h"

#include <string.h>

typedef int cl_int;
typedef unsigned cl_uint;
typedef uint64_t cl_bits;
typedef void *cl_object;

enum {
	CL_OK = 0,
	CL_COMPLETE_STATUS = 0,
	CL_EVENT_STATUS = 0x11D3,
	CL_COMMAND_QUEUED = 0x1280,
	CL_COMMAND_STARTED = 0x1282,
	CL_COMMAND_ENDED = 0x1283,
	CL_QUEUE_PROPERTIES_NAME = 0x1093,
	CL_PROFILING = 2,
	CL_FUNCTION_NAME = 0x1190,
	COPY_H2D = 1, /* as CUPTI numbers them */
	COPY_D2H = 2,
	COPY_D2D = 8,
};

#define CL_FUNCTIONS(X)                                                                            \
	X(clGetEventInfo, (cl_object, cl_uint, size_t, void *, size_t *))                          \
	X(clGetEventProfilingInfo, (cl_object, cl_uint, size_t, void *, size_t *))                 \
	X(clGetKernelInfo, (cl_object, cl_uint, size_t, void *, size_t *))                         \
	X(clRetainEvent, (cl_object))                                                              \
	X(clReleaseEvent, (cl_object))

static struct {
#define FIELD(name, arguments) cl_int(*name) arguments;
	CL_FUNCTIONS(FIELD)
} cl;

#define PENDING 256 /* timed commands that have not ended; beyond it they are untimed (lost_pool) */
enum { COMMAND_FREE, COMMAND_TAKEN, COMMAND_QUEUED };
static struct command {
	_Atomic uint32_t state;
	cl_object event;
	struct inject_record record;
	struct frames frames;
} commands[PENDING];
static _Atomic uint32_t next_command;
static _Atomic int32_t queued;

// On the stack of the thread that enqueues, until the call has returned: a thread that is cancelled in it
// leaves nothing behind.
struct enqueue {
	struct inject_record record;
	struct frames frames;
	bool handed_out;    // the program asked for the event, and holds it too
	cl_object own, *to; // where the event is written: `own`, or where the program wants it
	uint64_t begun_ns, own_ns; // own: how long we took until the program's call began
};

static bool begin(struct enqueue *e, cl_object queue, cl_object **event, uint16_t type, void *frame,
		  void *caller)
{
	uint32_t weight;
	if (!sampling_due((enum inject_type)type, &weight))
		return false;
	e->begun_ns = now_ns();
	watch_exit();
	e->handed_out = *event != NULL;
	e->own = NULL;
	e->to = *event ? *event : &e->own;
	*event = e->to;
	e->record = (struct inject_record){
		.type = type,
		.source = INJECT_BY_OPENCL,
		.correlation = next_correlation(),
		.weight = weight,
		.stream = (uint64_t)(uintptr_t)queue,
		.tid = self_sampling.tid,
	};
	uint32_t request = shared.control->request;
	e->record.start_ns = e->begun_ns;
	e->frames.count = 0;
	if (request & INJECT_STACKS)
		frames_walk(&e->frames, frame, (uintptr_t)caller);
	if (request & INJECT_SITE)
		sonde_inject_site(e->record.correlation);
	e->own_ns = now_ns() - e->begun_ns;
	return true;
}

static struct command *take_command(void)
{
	uint32_t from = atomic_fetch_add_explicit(&next_command, 1, memory_order_relaxed);
	for (uint32_t k = 0; k < 8; k++) {
		struct command *c = &commands[(from + k) % PENDING];
		uint32_t is_free = COMMAND_FREE;
		if (atomic_compare_exchange_strong(&c->state, &is_free, COMMAND_TAKEN))
			return c;
	}
	return NULL;
}

static void end(struct enqueue *e, cl_int result)
{
	uint64_t returned_ns = now_ns();
	if (result == CL_OK && !*e->to)
		sampling_carry(e->record.type, e->record.weight);
	if (result != CL_OK || !*e->to)
		return;
	struct command *c = take_command();
	if (!c) {
		COUNT(lost_pool, 1);
		sampling_carry(e->record.type, e->record.weight);
		if (!e->handed_out)
			cl.clReleaseEvent(*e->to);
		return;
	}
	if (e->handed_out && cl.clRetainEvent(*e->to) != CL_OK) {
		atomic_store(&c->state, COMMAND_FREE);
		return;
	}
	c->event = *e->to;
	c->record = e->record;
	frames_copy(&c->frames, &e->frames);
	atomic_fetch_add(&queued, 1);
	atomic_store(&c->state, COMMAND_QUEUED);
	sampling_cost(e->own_ns + now_ns() - returned_ns);
}

static void describe_kernel(struct enqueue *e, cl_object kernel, cl_uint dimensions,
			    const size_t *global, const size_t *local)
{
	struct inject_record *r = &e->record;
	char name[INJECT_NAME_MAX];
	size_t length = 0;
	if (cl.clGetKernelInfo(kernel, CL_FUNCTION_NAME, sizeof name, name, &length) == CL_OK)
		r->name = shared_name(name);
	for (cl_uint k = 0; k < 3; k++) {
		size_t of = k < dimensions && local && local[k] ? local[k] : 1;
		size_t all = k < dimensions && global ? global[k] : 1;
		r->block[k] = (uint32_t)of;
		r->grid[k] = (uint32_t)((all + of - 1) / of);
	}
}

static void describe_copy(struct enqueue *e, uint64_t bytes, uint16_t kind)
{
	e->record.bytes = bytes;
	e->record.kind = kind;
}

#define HOOK(NAME, TYPE, PARAMETERS, VALUES, DESCRIBE)                                             \
	static cl_int(*real_##NAME) PARAMETERS;                                                    \
	static __attribute__((noinline)) cl_int timed_##NAME PARAMETERS                            \
	{                                                                                          \
		struct enqueue e;                                                                  \
		if (!begin(&e, queue, &event, TYPE, __builtin_frame_address(0),                    \
			   __builtin_return_address(0)))                                           \
			return REAL(NAME) VALUES;                                                  \
		DESCRIBE;                                                                          \
		cl_int result = REAL(NAME) VALUES;                                                 \
		end(&e, result);                                                                   \
		return result;                                                                     \
	}                                                                                          \
	static cl_int hook_##NAME PARAMETERS                                                       \
	{                                                                                          \
		if (likely(sampling_skips(TYPE)))                                                  \
			return REAL(NAME) VALUES;                                                  \
		return timed_##NAME VALUES;                                                        \
	}

#define KERNEL_PARAMETERS                                                                          \
	(cl_object queue, cl_object kernel, cl_uint dimensions, const size_t *offset,              \
	 const size_t *global, const size_t *local, cl_uint waits, const cl_object *wait,          \
	 cl_object *event)
#define KERNEL_VALUES (queue, kernel, dimensions, offset, global, local, waits, wait, event)
#define TRANSFER_PARAMETERS                                                                        \
	(cl_object queue, cl_object buffer, cl_uint blocking, size_t offset, size_t bytes,         \
	 void *host, cl_uint waits, const cl_object *wait, cl_object *event)
#define TRANSFER_VALUES (queue, buffer, blocking, offset, bytes, host, waits, wait, event)
#define COPY_PARAMETERS                                                                            \
	(cl_object queue, cl_object from, cl_object to, size_t from_at, size_t to_at,              \
	 size_t bytes, cl_uint waits, const cl_object *wait, cl_object *event)
#define COPY_VALUES (queue, from, to, from_at, to_at, bytes, waits, wait, event)

HOOK(clEnqueueNDRangeKernel, INJECT_KERNEL, KERNEL_PARAMETERS, KERNEL_VALUES,
     describe_kernel(&e, kernel, dimensions, global, local))
HOOK(clEnqueueReadBuffer, INJECT_COPY, TRANSFER_PARAMETERS, TRANSFER_VALUES,
     describe_copy(&e, bytes, COPY_D2H))
HOOK(clEnqueueWriteBuffer, INJECT_COPY, TRANSFER_PARAMETERS, TRANSFER_VALUES,
     describe_copy(&e, bytes, COPY_H2D))
HOOK(clEnqueueCopyBuffer, INJECT_COPY, COPY_PARAMETERS, COPY_VALUES,
     describe_copy(&e, bytes, COPY_D2D))

// ---- queues: made with profiling, or, where that fails, without -----------------------------------

static cl_object (*real_clCreateCommandQueue)(cl_object, cl_object, cl_bits, cl_int *);
static cl_object (*real_clCreateCommandQueueWithProperties)(cl_object, cl_object, const cl_bits *,
							    cl_int *);

static bool is_layer; // the loader calls us

// As a layer we may be called before our thread has armed the hooks for the first time.
static bool wants_profiling(void)
{
	const struct inject_control *c = shared.control;
	return atomic_load_explicit(&sampling->armed, memory_order_relaxed) == ARMED ||
	       (is_layer && shared.header && !c->off && (c->request & INJECT_OPENCL));
}

static cl_object hook_clCreateCommandQueue(cl_object context, cl_object device, cl_bits properties,
					   cl_int *error)
{
	if (wants_profiling() && !(properties & CL_PROFILING)) {
		cl_object queue = real_clCreateCommandQueue(context, device,
							    properties | CL_PROFILING, error);
		if (queue)
			return queue;
	}
	return real_clCreateCommandQueue(context, device, properties, error);
}

#define MAX_PROPERTIES 32 /* words of a list that are read */
static cl_object hook_clCreateCommandQueueWithProperties(cl_object context, cl_object device,
							 const cl_bits *properties, cl_int *error)
{
	cl_bits with[MAX_PROPERTIES + 3];
	unsigned n = 0;
	bool found = false;
	for (; properties && properties[n] && n < MAX_PROPERTIES; n += 2) {
		with[n] = properties[n];
		with[n + 1] = properties[n + 1];
		if (with[n] == CL_QUEUE_PROPERTIES_NAME) {
			with[n + 1] |= CL_PROFILING;
			found = true;
		}
	}
	if (!found && n <= MAX_PROPERTIES) {
		with[n] = CL_QUEUE_PROPERTIES_NAME;
		with[n + 1] = CL_PROFILING;
		n += 2;
	}
	with[n] = 0;
	if (wants_profiling() && n <= MAX_PROPERTIES) {
		cl_object queue =
			real_clCreateCommandQueueWithProperties(context, device, with, error);
		if (queue)
			return queue;
	}
	return real_clCreateCommandQueueWithProperties(context, device, properties, error);
}

// ---- our own thread ------------------------------------------------------------------------------

#define ENTRY(NAME) {#NAME, (void *)hook_##NAME, (void **)&real_##NAME, NULL},
static struct hook table[] = {
	// clang-format off
	ENTRY(clEnqueueNDRangeKernel) ENTRY(clEnqueueReadBuffer)
	ENTRY(clEnqueueWriteBuffer) ENTRY(clEnqueueCopyBuffer)
	ENTRY(clCreateCommandQueue) ENTRY(clCreateCommandQueueWithProperties)
	// clang-format on
};
static const char *const loader_and_devices[] = {
	"libOpenCL", "libpocl", "libnvidia-", "linux-vdso", "ld-linux", "libc.so", NULL,
};
static const struct hooks hooks = {table, sizeof table / sizeof *table, 1, loader_and_devices};

static enum inject_reason opencl_begin(void)
{
	if (real_clEnqueueNDRangeKernel)
		return INJECT_OK;
#define RESOLVE(name, arguments)                                                                   \
	if (!(cl.name = (cl_int(*) arguments)module_symbol("libOpenCL", #name)))                   \
		return INJECT_NO_LIBRARY;
	CL_FUNCTIONS(RESOLVE)
	for (unsigned k = 0; k < hooks.count; k++)
		__atomic_store_n(table[k].real, module_symbol("libOpenCL", table[k].name),
				 __ATOMIC_RELEASE);
	return real_clEnqueueNDRangeKernel ? INJECT_OK : INJECT_NO_LIBRARY;
}

static unsigned opencl_hook(bool in, bool only_new)
{
	if (is_layer && in)
		return hooks.count;
	return real_clEnqueueNDRangeKernel ? hooks_apply(&hooks, in, only_new) : 0;
}

static const struct hooks *opencl_hooks(void)
{
	return real_clEnqueueNDRangeKernel && !is_layer ? &hooks : NULL;
}

static unsigned opencl_by_loader(void)
{
	return is_layer ? hooks.count : 0;
}

// Places in struct _cl_icd_dispatch, which only ever grows at its end (CL/cl_icd.h).
static const struct {
	const char *name;
	unsigned place;
} places[] = {
	{"clCreateCommandQueue", 9}, {"clCreateCommandQueueWithProperties", 123},
	{"clEnqueueCopyBuffer", 50}, {"clEnqueueNDRangeKernel", 59},
	{"clEnqueueReadBuffer", 48}, {"clEnqueueWriteBuffer", 49},
	{"clGetEventInfo", 42},	     {"clGetEventProfilingInfo", 45},
	{"clGetKernelInfo", 39},     {"clReleaseEvent", 44},
	{"clRetainEvent", 43},
};

static void **entry_of(void **entries, unsigned count, const char *name)
{
	for (unsigned k = 0; k < sizeof places / sizeof *places; k++)
		if (!strcmp(places[k].name, name))
			return places[k].place < count ? &entries[places[k].place] : NULL;
	return NULL;
}

bool opencl_stand_between(void **entries, unsigned count)
{
	void **entry;
#define TAKE(name, arguments)                                                                      \
	entry = entry_of(entries, count, #name);                                                   \
	if (!entry || !*entry)                                                                     \
		return false;                                                                      \
	cl.name = (cl_int(*) arguments) * entry;
	CL_FUNCTIONS(TAKE)
	for (unsigned k = 0; k < hooks.count; k++) {
		entry = entry_of(entries, count, table[k].name);
		if (!entry || !*entry)
			continue; // the loader is older than this function
		__atomic_store_n(table[k].real, *entry, __ATOMIC_RELEASE);
		*entry = table[k].ours;
	}
	is_layer = real_clEnqueueNDRangeKernel != NULL;
	return is_layer;
}

static void read_command(struct command *c)
{
	cl_int status = 0;
	uint64_t enqueued = 0, started = 0, ended = 0;
	cl_int r = cl.clGetEventInfo(c->event, CL_EVENT_STATUS, sizeof status, &status, NULL);
	if (r == CL_OK && status > CL_COMPLETE_STATUS)
		return;
	if (r == CL_OK && status == CL_COMPLETE_STATUS)
		r = cl.clGetEventProfilingInfo(c->event, CL_COMMAND_QUEUED, sizeof enqueued,
					       &enqueued, NULL) ||
		    cl.clGetEventProfilingInfo(c->event, CL_COMMAND_STARTED, sizeof started,
					       &started, NULL) ||
		    cl.clGetEventProfilingInfo(c->event, CL_COMMAND_ENDED, sizeof ended, &ended,
					       NULL);
	if (r == CL_OK && status == CL_COMPLETE_STATUS && ended >= started) {
		// Times are of the device's clock. CL_COMMAND_QUEUED is when the host enqueued it: start_ns.
		if (started >= enqueued)
			c->record.start_ns += started - enqueued;
		c->record.end_ns = c->record.start_ns + (ended - started);
		c->record.flags = c->frames.count ? 0 : INJECT_NO_STACK;
		if (c->frames.count)
			frames_put(&c->frames, c->record.correlation, c->record.tid);
		sampling_put(&c->record);
	} else {
		COUNT(lost_order, 1);
		sampling_carry(c->record.type, c->record.weight);
	}
	cl.clReleaseEvent(c->event);
	atomic_fetch_sub(&queued, 1);
	atomic_store(&c->state, COMMAND_FREE);
}

static bool opencl_pending(void)
{
	return atomic_load(&queued) > 0;
}

static void opencl_poll(void)
{
	if (!opencl_pending() || !step_begin())
		return;
	for (int k = 0; k < PENDING && opencl_pending() && !step_is_unwanted(); k++)
		if (atomic_load(&commands[k].state) == COMMAND_QUEUED)
			read_command(&commands[k]);
	step_end();
}

static void opencl_forget(void)
{
	for (int k = 0; k < PENDING; k++)
		atomic_store(&commands[k].state, COMMAND_FREE);
	atomic_store(&queued, 0);
}

const struct backend opencl_backend = {
	.requests = INJECT_OPENCL,
	.begin = opencl_begin,
	.hook = opencl_hook,
	.hooks = opencl_hooks,
	.by_loader = opencl_by_loader,
	.poll = opencl_poll,
	.pending = opencl_pending,
	.forget = opencl_forget,
};
