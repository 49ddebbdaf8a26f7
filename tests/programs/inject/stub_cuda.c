// SPDX-License-Identifier: Apache-2.0
// Stands in for libcuda.so.1 where there is no GPU: the functions that the library in inject/ uses, with
// streams whose time goes by as on a device, one kernel after the other. It ends the program when it
// is used in a way that a real driver would punish.
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define STREAMS 64
#define FUNCTIONS 64

struct function {
	const char *name;
	uint64_t ns;
	atomic_ulong launches;
	atomic_ulong total_ns;
};
struct event {
	uint64_t at;
	int recorded;
	pthread_mutex_t lock;
};
struct stream {
	pthread_mutex_t lock;
	uint64_t busy_until;
	atomic_int capturing;
};

static struct function functions[FUNCTIONS];
static atomic_int n_functions;
static struct stream streams[STREAMS]; // 0 and 1: default, 2: per thread
static atomic_int n_streams = 3;
static atomic_int captures;
static int context; // its address is the context
static _Thread_local void *current = &context;
static _Thread_local int capture_mode; // 0: global

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void punish(const char *what)
{
	fprintf(stderr, "stub driver: %s\n", what);
	abort();
}

__attribute__((constructor)) static void begin(void)
{
	for (int i = 0; i < STREAMS; i++)
		pthread_mutex_init(&streams[i].lock, NULL);
}

// A call that other threads' captures in global mode forbid.
static void unsafe(void)
{
	if (captures > 0 && capture_mode == 0)
		punish("an unsafe call while a stream is captured");
}

static struct stream *stream_of(void *handle)
{
	uintptr_t n = (uintptr_t)handle;
	if (n >= STREAMS)
		punish("a stream that is none");
	return &streams[n == 1 ? 0 : n];
}

void *stub_function(const char *name, uint64_t ns)
{
	struct function *f = &functions[n_functions++];
	f->name = strdup(name);
	f->ns = ns;
	return f;
}
unsigned long stub_launches(void *f)
{
	return ((struct function *)f)->launches;
}

int cuInit(unsigned flags)
{
	return (int)flags * 0;
}
int cuDriverGetVersion(int *version)
{
	return *version = 13000, 0;
}
int cuCtxGetCurrent(void **c)
{
	return *c = current, 0;
}
int cuCtxPushCurrent_v2(void *c)
{
	return current = c, 0;
}
int cuCtxPopCurrent_v2(void **c)
{
	return *c = current, 0;
}
int cuCtxGetDevice(int *device)
{
	return *device = 0, 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode)
{
	int before = capture_mode;
	capture_mode = *mode;
	*mode = before;
	return 0;
}
int cuEventCreate(void **event, unsigned flags)
{
	(void)flags;
	unsafe();
	struct event *e = calloc(1, sizeof *e);
	pthread_mutex_init(&e->lock, NULL);
	return *event = e, 0;
}
int cuEventDestroy_v2(void *event)
{
	return free(event), 0;
}
int cuEventRecord(void *event, void *stream)
{
	struct event *e = event;
	struct stream *s = stream_of(stream);
	if (s->capturing)
		punish("an event of ours in a captured stream");
	if (s == &streams[0] && captures > 0)
		punish("an event of ours in the default stream while another is captured");
	pthread_mutex_lock(&s->lock);
	uint64_t now = now_ns();
	uint64_t at = s->busy_until > now ? s->busy_until : now;
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_lock(&e->lock);
	e->at = at;
	e->recorded = 1;
	pthread_mutex_unlock(&e->lock);
	return 0;
}
int cuEventQuery(void *event)
{
	struct event *e = event;
	unsafe();
	pthread_mutex_lock(&e->lock);
	int ready = now_ns() >= e->at;
	pthread_mutex_unlock(&e->lock);
	return ready ? 0 : 600;
}
int cuEventElapsedTime(float *ms, void *begin, void *end)
{
	struct event *b = begin, *e = end;
	*ms = (float)((double)((int64_t)(e->at - b->at)) / 1e6);
	return 0;
}
int cuStreamIsCapturing(void *stream, int *status)
{
	*status = stream_of(stream)->capturing ? 1 : 0;
	if (stream_of(stream) == &streams[0] && captures > 0)
		return 906; // stream capture implicit
	return 0;
}
int cuStreamCreate(void **stream, unsigned flags)
{
	(void)flags;
	int n = n_streams++;
	if (n >= STREAMS)
		return 2;
	return *stream = (void *)(uintptr_t)n, 0;
}
int cuStreamDestroy_v2(void *stream)
{
	return (void)stream, 0;
}
int cuStreamBeginCapture_v2(void *stream, int mode)
{
	(void)mode;
	if (stream_of(stream)->capturing++)
		punish("captured twice");
	captures++;
	return 0;
}
int cuStreamEndCapture(void *stream, void **graph)
{
	stream_of(stream)->capturing--;
	captures--;
	return *graph = stub_function("graph", 100000), 0;
}
int cuModuleLoadData(void **module, const void *code)
{
	(void)code;
	return *module = &functions, 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name)
{
	(void)module;
	return *function = stub_function(name, 0), 0;
}
int cuMemHostAlloc(void **at, size_t bytes, unsigned flags)
{
	(void)flags;
	return *at = calloc(1, bytes), 0;
}
int cuFuncGetName(const char **name, void *f)
{
	return *name = ((struct function *)f)->name, 0;
}

static int run(struct function *f, void *stream)
{
	struct stream *s = stream_of(stream);
	f->launches++;
	if (s->capturing)
		return 0;
	pthread_mutex_lock(&s->lock);
	uint64_t now = now_ns();
	s->busy_until = (s->busy_until > now ? s->busy_until : now) + f->ns;
	pthread_mutex_unlock(&s->lock);
	return 0;
}

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra)
{
	(void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)parameters,
		(void)extra;
	return run(f, stream);
}
int cuGraphLaunch(void *graph, void *stream)
{
	return run(graph, stream);
}
