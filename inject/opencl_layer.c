// SPDX-License-Identifier: Apache-2.0
// OPENCL_LAYERS: during a program's first call the OpenCL loader puts our hooks between the program and its devices.
// So the very first queue is made with profiling, and no slot has to be found.
#include "internal.h"

#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define MOST_ENTRIES 512 /* of a loader's table; 149 in OpenCL 3.0 */

enum { // of CL/cl.h and CL/cl_layer.h
	DONE = 0,
	INVALID_VALUE = -30,
	INVALID_OPERATION = -59,
	LAYER_API_VERSION = 0x4240,
	LAYER_NAME = 0x4241,
	API_VERSION_100 = 100,
};

EXPORTED int clGetLayerInfo(unsigned what, size_t size, void *value, size_t *size_needed)
{
	static const unsigned version = API_VERSION_100;
	static const char name[] = "sonde";
	const void *from = what == LAYER_API_VERSION ? (const void *)&version : name;
	size_t needed = what == LAYER_API_VERSION ? sizeof version : sizeof name;
	if (what != LAYER_API_VERSION && what != LAYER_NAME)
		return INVALID_VALUE;
	if (value && size < needed)
		return INVALID_VALUE;
	if (value)
		memcpy(value, from, needed);
	if (size_needed)
		*size_needed = needed;
	return DONE;
}

EXPORTED int clInitLayer(unsigned count, void *const *target, unsigned *count_here,
			 void *const **layer)
{
	static void *entries[MOST_ENTRIES];
	if (!target || !count_here || !layer)
		return INVALID_VALUE;
	if (!shared.header || count > MOST_ENTRIES || entries[0])
		return INVALID_OPERATION; // the loader continues without us
	memcpy(entries, target, count * sizeof *entries);
	if (!opencl_stand_between(entries, count))
		return INVALID_OPERATION;
	*count_here = count;
	*layer = entries;
	return DONE;
}
