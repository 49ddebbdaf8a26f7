// SPDX-License-Identifier: Apache-2.0
// The backend of CUDA: finds the driver's functions, and puts the hooks of cuda_*.c in and out.
#include "cuda.h"

struct driver driver;

/* Their slots stay: a call of the driver by itself or by a tool is none of the program's. */
static const char *const driver_and_tools[] = {
	"libcuda.so", "libcupti", "libnvidia-", "linux-vdso", "ld-linux", "libc.so", NULL,
};

#define MOST_HOOKS 80 /* room for those of all cuda_*.c and profilers.c */
static struct hook table[MOST_HOOKS];
static struct hooks hooks = {table, 0, 0, driver_and_tools};

static void add_to_table(struct hook_list list)
{
	for (unsigned k = 0; k < list.count && hooks.count < MOST_HOOKS; k++)
		table[hooks.count++] = list.table[k];
}

static void list_hooks(void)
{
	hooks.count = 0;
	add_to_table(launch_hooks());
	add_to_table(copy_hooks());
	add_to_table(context_hooks());
	add_to_table(profiler_hooks());
}

// Calls of our threads must not end a stream capture of another thread, as they do in the default mode. The driver
// keeps the mode by thread; a forked child has a new one of ours, which sets it again.
void cuda_relax_thread(void)
{
	static __thread bool relaxed __attribute__((tls_model("initial-exec")));
	int mode = CU_CAPTURE_MODE_RELAXED;
	if (!relaxed && driver.cuThreadExchangeStreamCaptureMode)
		driver.cuThreadExchangeStreamCaptureMode(&mode);
	relaxed = true;
}

static enum inject_reason cuda_begin(void)
{
	const char *lib = "libcuda.so";
	if (driver.cuEventRecord) {
		if ((void *)driver.cuEventRecord == module_symbol(lib, "cuEventRecord")) {
			cuda_relax_thread();
			return INJECT_OK;
		}
		driver = (struct driver){0}; // it was unloaded
		pools_gone();
	}
	struct driver d = {0};
	list_hooks();
#define RESOLVE(name, arguments)                                                                   \
	if (!(d.name = (cu_result(*) arguments)module_symbol(lib, #name)))                         \
		return module_symbol(lib, "cuInit") ? INJECT_DRIVER_OLD : INJECT_NO_LIBRARY;
	DRIVER_FUNCTIONS(RESOLVE)
#define RESOLVE_OPTIONAL(name, arguments)                                                          \
	d.name = (cu_result(*) arguments)module_symbol(lib, #name);
	DRIVER_OPTIONAL(RESOLVE_OPTIONAL)
	for (unsigned k = 0; k < hooks.count; k++)
		if (!table[k].module)
			__atomic_store_n(table[k].real, module_symbol(lib, table[k].name),
					 __ATOMIC_RELEASE);
	if (!(d.cuLaunchKernel = real_launch_kernel()))
		return INJECT_DRIVER_OLD;
	int version = 0;
	d.cuDriverGetVersion(&version);
	SET(driver_version, (uint32_t)version);
	driver = d;
	cuda_relax_thread();
	return INJECT_OK;
}

static unsigned cuda_hook(bool in, bool only_new)
{
	if (!driver.cuEventRecord)
		return 0;
	if (!in)
		profilers_forget();
	else if (profilers_found())
		only_new = false;
	return hooks_apply(&hooks, in, only_new);
}

static void cuda_unhooked(void)
{
	profilers_forget();
}

static const struct hooks *cuda_hooks(void)
{
	if (!driver.cuEventRecord)
		return NULL;
	profilers_found();
	return &hooks;
}

static void cuda_forget(void)
{
	captures_forget();
	sections_forget();
	profilers_forget();
	trace_forget();
	cuda_waits_forget();
	pools_forget();
}

static void cuda_poll(void)
{
	cuda_waits_poll();
	sections_poll();
	if (!driver.cuEventRecord || !step_begin())
		return;
	pools_poll();
	step_end();
}

static bool cuda_pending(void)
{
	return pools_pending() || cuda_waits_pending() || launches_under_way();
}

const struct backend cuda_backend = {
	.requests = INJECT_EVENTS | INJECT_WINDOWS,
	.begin = cuda_begin,
	.hook = cuda_hook,
	.hooks = cuda_hooks,
	.unhooked = cuda_unhooked,
	.poll = cuda_poll,
	.pending = cuda_pending,
	.yields = cuda_yields,
	.forget = cuda_forget,
};
