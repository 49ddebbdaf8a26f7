// SPDX-License-Identifier: Apache-2.0
// Contexts that are taken away: with them go their events, which must not be touched again.
//
// While a context is destroyed our thread takes no step in the driver at all; the context's pool is marked as gone
// before it goes on. A context that is used again gets a new pool.
#include "cuda.h"

static cu_result gone_with(cu_context context, cu_result result)
{
	pools_nothing_wanted();
	// Also where it failed: the error may be that of an earlier asynchronous launch, and the context be gone.
	pools_of_context_gone(context);
	steps_resume();
	return result;
}

// A primary context is destroyed when its last user releases it.
static cu_result released(int device, cu_result result)
{
	unsigned flags = 0;
	int active = 0;
	bool stays = driver.cuDevicePrimaryCtxGetState &&
		     driver.cuDevicePrimaryCtxGetState(device, &flags, &active) == CU_OK && active;
	pools_nothing_wanted();
	if (!stays)
		pools_of_device_gone(device);
	steps_resume();
	return result;
}

static cu_result reset(int device, cu_result result)
{
	pools_nothing_wanted();
	pools_of_device_gone(device);
	steps_resume();
	return result;
}

static cu_result all_gone(cu_result result)
{
	pools_gone();
	steps_resume();
	return result;
}

#define TAKES_AWAY(NAME, PARAMETERS, VALUES, THEN)                                                 \
	static cu_result(*real_##NAME) PARAMETERS;                                                 \
	static cu_result hook_##NAME PARAMETERS                                                    \
	{                                                                                          \
		cu_result result;                                                                  \
		steps_stop();                                                                      \
		result = REAL(NAME) VALUES;                                                        \
		return THEN;                                                                       \
	}

TAKES_AWAY(cuCtxDestroy, (cu_context context), (context), gone_with(context, result))
TAKES_AWAY(cuCtxDestroy_v2, (cu_context context), (context), gone_with(context, result))
TAKES_AWAY(cuDevicePrimaryCtxRelease, (int device), (device), released(device, result))
TAKES_AWAY(cuDevicePrimaryCtxRelease_v2, (int device), (device), released(device, result))
TAKES_AWAY(cuDevicePrimaryCtxReset, (int device), (device), reset(device, result))
TAKES_AWAY(cuDevicePrimaryCtxReset_v2, (int device), (device), reset(device, result))
TAKES_AWAY(cuGreenCtxDestroy, (void *context), (context), all_gone(result))

static const struct hook contexts[] = {
	// clang-format off
	ENTRY(cuCtxDestroy) ENTRY(cuCtxDestroy_v2)
	ENTRY(cuDevicePrimaryCtxRelease) ENTRY(cuDevicePrimaryCtxRelease_v2)
	ENTRY(cuDevicePrimaryCtxReset) ENTRY(cuDevicePrimaryCtxReset_v2)
	ENTRY(cuGreenCtxDestroy)
	// clang-format on
};

struct hook_list context_hooks(void)
{
	return (struct hook_list){contexts, sizeof contexts / sizeof *contexts};
}
