// SPDX-License-Identifier: Apache-2.0
// Opening and closing windows, and finalizing CUPTI after one.
#include "windows.h"

#include <stdlib.h>
#include <string.h>

struct window windows[MAX_WINDOWS];
unsigned n_windows;
atomic_uint window_now;
pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;
bool window_open, may_yield;
const char *kinds = "k", *flags = "-";
atomic_int finalize_armed, finalized;
unsigned finalizes, finalize_missed;
int finalize_result;
static CUpti_SubscriberHandle subscriber;
static bool subscribed;

static const int launch_ids[] = {
	CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel,	  CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz,
	CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz,
	CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch,	  CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch_ptsz,
};

// As NVIDIA's own sample does it: in the application's thread, at the exit of a call; here of one after
// which the device is idle, as far as that thread's work goes.
void finalize_at_sync(void)
{
	if (p_cuptiSubscribe(&subscriber, on_call, NULL) != CUPTI_SUCCESS) {
		finalize_missed++;
		return;
	}
	finalized = 0;
	finalize_armed = 1;
	p_cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API,
			      CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize);
	p_cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API,
			      CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize);
	for (int i = 0; i < 300 && !finalized; i++) {
		struct timespec t = {0, 1000000};
		nanosleep(&t, NULL);
	}
	int armed = 1;
	if (!finalized && atomic_compare_exchange_strong(&finalize_armed, &armed, 0)) {
		p_cuptiUnsubscribe(subscriber);
		finalize_missed++;
	} else {
		finalizes++;
	}
}

static int kind_of(char c)
{
	switch (c) {
	case 'k':
		return CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
	case 'r':
		return CUPTI_ACTIVITY_KIND_RUNTIME;
	case 'd':
		return CUPTI_ACTIVITY_KIND_DRIVER;
	case 'g':
		return CUPTI_ACTIVITY_KIND_GRAPH_TRACE;
	default:
		return -1;
	}
}

static void stamp(uint64_t *dev, uint64_t *mono)
{
	uint64_t a = now_ns();
	p_cuptiGetTimestamp(dev);
	*mono = a + (now_ns() - a) / 2;
}

void open_window(unsigned w)
{
	struct window *v = &windows[w];
	window_now = w;
	v->open0 = now_ns();
	if (strchr(flags, 'r'))
		v->result |= p_cuptiActivityRegisterCallbacks(buffer_requested, buffer_completed);
	stamp(&v->open_dev, &v->open_mono);
	if (strchr(kinds, 'c')) {
		int r = subscribed ? 0 : p_cuptiSubscribe(&subscriber, on_call, NULL);
		v->result |= (uint32_t)r << 8;
		subscribed = r == CUPTI_SUCCESS;
		for (unsigned i = 0; subscribed && i < sizeof launch_ids / sizeof *launch_ids; i++)
			p_cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API,
					      launch_ids[i]);
	}
	for (const char *k = kinds; *k; k++)
		if (kind_of(*k) > 0)
			v->result |= (uint32_t)p_cuptiActivityEnable(kind_of(*k)) << 16;
	v->open1 = now_ns();
	window_open = true;
}

void close_window(unsigned w, bool forced)
{
	struct window *v = &windows[w];
	if (!window_open)
		return;
	window_open = false;
	v->close0 = now_ns();
	for (const char *k = kinds; *k; k++)
		if (kind_of(*k) > 0)
			p_cuptiActivityDisable(kind_of(*k));
	if (subscribed) {
		p_cuptiUnsubscribe(subscriber);
		subscribed = false;
	}
	stamp(&v->close_dev, &v->close_mono);
	v->close1 = now_ns();
	if (!forced) {
		struct timespec drain = {0, 10000000};
		nanosleep(&drain, NULL);
	}
	p_cuptiActivityFlushAll(forced || strchr(flags, 'f') ? 1 : 0);
	if (!forced && strchr(flags, 'z'))
		finalize_at_sync();
	v->flushed = now_ns();
}

static void sleep_ms(double ms)
{
	struct timespec t = {(time_t)(ms / 1e3), (long)(ms * 1e6) % 1000000000};
	nanosleep(&t, NULL);
}

void do_windows(const char *k, double on, double off, int n, const char *f)
{
	kinds = strdup(k), flags = strdup(f);
	may_yield = strchr(f, 'y');
	unsigned seed = 12345;
	for (int i = 0; i < n && n_windows < MAX_WINDOWS; i++) {
		sleep_ms(off * (0.5 + (rand_r(&seed) % 1000) / 1000.0));
		while (may_yield && foreign_active) {
			if (now_ns() - foreign_last > 700000000ull)
				foreign_active = false;
			sleep_ms(20);
		}
		pthread_mutex_lock(&owner);
		unsigned w = n_windows++;
		if (!(may_yield && foreign_active))
			open_window(w);
		pthread_mutex_unlock(&owner);
		sleep_ms(on);
		pthread_mutex_lock(&owner);
		close_window(w, false);
		pthread_mutex_unlock(&owner);
	}
}
