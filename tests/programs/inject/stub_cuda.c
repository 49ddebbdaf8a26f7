// SPDX-License-Identifier: Apache-2.0
// Stands in for libcuda.so.1 where there is no GPU: the functions that the library in inject/ uses, with
// streams whose time goes by as on a device, one kernel after the other. It ends the program when it
// is used in a way that a real driver would punish.
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define STREAMS 4096
#define QUEUE_NS 50000000 // what a stream holds; a launch beyond that waits, as a driver's does

struct function {
	const char *name;
	uint64_t ns;
	atomic_ulong launches;
	atomic_ulong total_ns;
};
// A primary context is used again at the same address: its epoch distinguishes one life from the next.
struct context {
	atomic_int is_alive;
	atomic_int epoch;
	atomic_int in_use; // calls that are under way
	int is_primary;
	int users;
};
struct event {
	struct context *context;
	int epoch;
	int is_destroyed;
	uint64_t at;
	int recorded;
	pthread_mutex_t lock;
};
struct stream {
	pthread_mutex_t lock;
	uint64_t busy_until;
	atomic_int capturing;
};

static int module;		       // its address is every module
static struct stream streams[STREAMS]; // 0 and 1: default, 2: per thread
static atomic_int n_streams = 3;
static atomic_int captures;
#define CONTEXTS 4096
static struct context primary = {.is_alive = 1, .is_primary = 1, .epoch = 1, .users = 1};
static struct context contexts[CONTEXTS];
static atomic_int n_contexts, epochs = 1;
static _Thread_local struct context *current = &primary;
static _Thread_local int is_the_program_s; // this thread launched something
static atomic_int is_down;
static atomic_ulong bytes_moved, waits;
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

// A call that uses a context, or an event of it: it must live from begin to end.
static struct context *enter(struct context *c, int epoch)
{
	c->in_use++;
	if (!c->is_alive || c->epoch != epoch)
		punish("a context that was destroyed is used, or an event of it");
	if (is_down && !is_the_program_s)
		punish("a call of another thread after the driver's end");
	return c;
}
static void leave(struct context *c)
{
	for (int i = 0; i < 200 && !is_the_program_s; i++)
		__builtin_ia32_pause(); // time for the program to be in the way
	c->in_use--;
}
static void destroy(struct context *c)
{
	struct timespec t = {0, 200000};
	nanosleep(&t, NULL); // as what is under way is waited for
	c->is_alive = 0;
	if (c->in_use)
		punish("a context is destroyed while it is used");
}
static struct event *use(void *event)
{
	struct event *e = event;
	if (e->is_destroyed)
		punish("an event that was destroyed is used");
	enter(e->context, e->epoch);
	return e;
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
	struct function *f = calloc(1, sizeof *f);
	f->name = strdup(name);
	f->ns = ns;
	return f;
}
unsigned long stub_launches(void *f)
{
	return ((struct function *)f)->launches;
}

static void go_down(void)
{
	struct timespec t = {0, 30000000};
	is_down = 1;
	nanosleep(&t, NULL); // it takes its time; who comes now is punished
	for (int i = 0; i < n_contexts; i++)
		if (contexts[i].in_use && !is_the_program_s)
			punish("the driver ends while it is used");
}
int cuInit(unsigned flags)
{
	static atomic_int once;
	is_the_program_s = 1;
	if (!once++) {
		atexit(go_down);
		if (getenv("CUDA_INJECTION64_PATH")) // as the real one does
			dlopen(getenv("CUDA_INJECTION64_PATH"), RTLD_NOW);
	}
	return (int)flags * 0;
}
int cuDriverGetVersion(int *version)
{
	return *version = 13000, 0;
}
int cuCtxCreate_v2(void **c, unsigned flags, int device)
{
	(void)flags, (void)device;
	struct context *made = &contexts[n_contexts++ % CONTEXTS];
	made->epoch = ++epochs;
	made->is_alive = 1;
	current = made;
	return *c = made, 0;
}
int cuCtxSetCurrent(void *c)
{
	return current = c, 0;
}
int cuCtxDestroy_v2(void *c)
{
	destroy(c);
	if (current == c)
		current = NULL;
	return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int device)
{
	(void)device;
	if (!primary.users++) {
		primary.epoch = ++epochs;
		primary.is_alive = 1;
	}
	return *c = &primary, 0;
}
int cuDevicePrimaryCtxRelease_v2(int device)
{
	(void)device;
	if (!--primary.users)
		destroy(&primary);
	return 0;
}
int cuDevicePrimaryCtxReset_v2(int device)
{
	(void)device;
	destroy(&primary);
	primary.users = 0;
	return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
	(void)device;
	*flags = 0;
	return *active = primary.is_alive, 0;
}
int cuCtxGetId(void *c, unsigned long long *id)
{
	struct context *of = enter(c, ((struct context *)c)->epoch);
	*id = of->epoch;
	leave(of);
	return 0;
}
int cuCtxGetCurrent(void **c)
{
	return *c = current, 0;
}
static _Thread_local struct context *pushed_on;
int cuCtxPushCurrent_v2(void *c)
{
	struct context *to = enter(c, ((struct context *)c)->epoch);
	pushed_on = current;
	current = to;
	leave(to);
	return 0;
}
int cuCtxPopCurrent_v2(void **c)
{
	*c = current;
	current = pushed_on;
	return 0;
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
	e->context = current;
	e->epoch = current->epoch;
	pthread_mutex_init(&e->lock, NULL);
	*event = use(e);
	leave(e->context);
	return 0;
}
int cuEventDestroy_v2(void *event)
{
	struct event *e = use(event);
	e->is_destroyed = 1;
	leave(e->context);
	return 0;
}
int cuEventRecord(void *event, void *stream)
{
	struct event *e = use(event);
	struct stream *s = stream_of(stream);
	if (s->capturing)
		punish("an event of ours in a captured stream");
	if (s == &streams[0] && captures > 0)
		punish("an event of ours in the default stream while another is captured");
	pthread_mutex_lock(&s->lock);
	uint64_t now = now_ns();
	uint64_t at = s->busy_until > now ? s->busy_until : now;
	s->busy_until = at + 2500; // as an H200 takes, about
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_lock(&e->lock);
	e->at = at;
	e->recorded = 1;
	pthread_mutex_unlock(&e->lock);
	leave(e->context);
	return 0;
}
int cuEventQuery(void *event)
{
	struct event *e = use(event);
	unsafe();
	pthread_mutex_lock(&e->lock);
	int ready = now_ns() >= e->at;
	pthread_mutex_unlock(&e->lock);
	leave(e->context);
	return ready ? 0 : 600;
}
int cuEventElapsedTime(float *ms, void *begin, void *end)
{
	struct event *b = use(begin), *e = use(end);
	*ms = (float)((double)((int64_t)(e->at - b->at)) / 1e6);
	leave(b->context);
	leave(e->context);
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
int cuModuleLoadData(void **to, const void *code)
{
	(void)code;
	if (getenv("STUB_LOADS_NO_MODULE"))
		punish("a module of ours where the queue is never empty");
	return *to = &module, 0;
}
int cuModuleGetFunction(void **function, void *of, const char *name)
{
	(void)of;
	// The gate holds the stream until the pair is whole; here, as long as that takes at most.
	return *function = stub_function(name, strcmp(name, "sonde_gate") ? 400 : 20000), 0;
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

static int queue(uint64_t ns, void *stream)
{
	struct stream *s = stream_of(stream);
	is_the_program_s = 1;
	if (is_down)
		return 4;
	if (!current || !current->is_alive)
		return 709;
	if (s->capturing)
		return 0;
	pthread_mutex_lock(&s->lock);
	uint64_t now = now_ns();
	s->busy_until = (s->busy_until > now ? s->busy_until : now) + ns;
	pthread_mutex_unlock(&s->lock);
	return 0;
}
static atomic_ulong all_launches;
unsigned long stub_all_launches(void)
{
	return all_launches;
}

static void wait_for_room(struct stream *s)
{
	for (uint64_t ahead;;) {
		pthread_mutex_lock(&s->lock);
		uint64_t now = now_ns();
		ahead = s->busy_until > now ? s->busy_until - now : 0;
		pthread_mutex_unlock(&s->lock);
		if (ahead <= QUEUE_NS)
			return;
		uint64_t more = ahead - QUEUE_NS;
		struct timespec t = {0, more < 900000000 ? more : 900000000};
		nanosleep(&t, NULL);
	}
}

// On an H200 replays ran slower ever after another thread than the program's had launched kernels.
static void only_by_the_program(void)
{
	static _Thread_local char name[16];
	if (!*name)
		prctl(PR_GET_NAME, name);
	if (!strcmp(name, "sonde"))
		punish("the library's own thread puts work on the device");
}

static int run(struct function *f, void *stream)
{
	only_by_the_program();
	wait_for_room(stream_of(stream));
	all_launches++;
	f->launches++;
	return queue(f->ns, stream);
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

// 10 bytes a nanosecond.
static int move(size_t bytes, void *stream)
{
	bytes_moved += bytes;
	return queue(bytes / 10, stream);
}
unsigned long stub_bytes_moved(void)
{
	return bytes_moved;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream)
{
	(void)to, (void)from;
	return move(bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream)
{
	(void)to, (void)from;
	return move(bytes, stream);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream)
{
	(void)to, (void)from;
	return move(bytes, stream);
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream)
{
	(void)to, (void)from;
	return move(bytes, stream);
}
// Addresses of the device's begin at 1 << 48.
int cuPointerGetAttribute(void *data, int attribute, uint64_t at)
{
	if (attribute != 2 || at < 1ull << 48)
		return 1;
	return *(int *)data = 2, 0;
}
int cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void *stream)
{
	(void)to, (void)value;
	return move(4 * count, stream);
}
// Does nothing at all: what a hook costs is measured on it.
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t count, void *stream)
{
	(void)to, (void)value, (void)count, (void)stream;
	return 0;
}
int cuStreamSynchronize(void *stream)
{
	struct stream *s = stream_of(stream);
	int64_t left = (int64_t)(s->busy_until - now_ns());
	struct timespec t = {0, left};
	waits++;
	if (left > 0)
		nanosleep(&t, NULL);
	return 0;
}
