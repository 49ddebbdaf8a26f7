/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for libcuda.so.1 of one device, whose copies from the host take as long as they would
 * at COPIES_GB_S. Only what `sonde health --bandwidth` asks for. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double queued_bytes;

int cuInit(unsigned int flags)
{
	(void)flags;
	return 0;
}

int cuDeviceGetCount(int *count)
{
	*count = 1;
	return 0;
}

int cuDeviceGet(int *device, int number)
{
	*device = number;
	return 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device)
{
	(void)device;
	memset(uuid, 0x11, 16);
	return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
	(void)device;
	*context = &queued_bytes;
	return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
	(void)device;
	return 0;
}

int cuCtxSetCurrent(void *context)
{
	return context != &queued_bytes;
}

int cuMemAllocHost_v2(void **memory, size_t bytes)
{
	*memory = malloc(bytes);
	return *memory == NULL;
}

int cuMemFreeHost(void *memory)
{
	free(memory);
	return 0;
}

int cuMemAlloc_v2(unsigned long long *memory, size_t bytes)
{
	(void)bytes;
	*memory = 1;
	return 0;
}

int cuMemFree_v2(unsigned long long memory)
{
	return memory != 1;
}

int cuMemcpyHtoDAsync_v2(unsigned long long target, const void *source, size_t bytes, void *stream)
{
	(void)source, (void)stream;
	queued_bytes += (double)bytes;
	return target != 1;
}

int cuCtxSynchronize(void)
{
	const char *rate = getenv("COPIES_GB_S");
	double seconds = queued_bytes / 1e9 / (rate ? strtod(rate, NULL) : 50);
	struct timespec pause = {(time_t)seconds, (long)(1e9 * (seconds - (double)(long)seconds))};

	queued_bytes = 0;
	return nanosleep(&pause, NULL) != 0;
}
