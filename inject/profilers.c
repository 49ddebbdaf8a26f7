// SPDX-License-Identifier: Apache-2.0
// Others that trace the device through CUPTI (torch.profiler, JAX's): what they switch on and off is
// noted, and while a kind that kernels or copies fall under is on, none of ours goes into a stream. So
// their trace holds what it holds without us. CUPTI itself is never called from here but for them.
#include "cuda.h"

typedef int cupti_result;

#define KINDS (1ull << 1 | 1ull << 2 | 1ull << 3 | 1ull << 10)
/* memcpy, memset, kernel, concurrent kernel: CUpti_ActivityKind, stable since CUDA 4 */

static _Atomic uint64_t kinds_on;

bool cuda_yields(void)
{
	return unlikely(atomic_load(&kinds_on) != 0);
}

static uint64_t bit_of(int kind)
{
	return kind >= 0 && kind < 64 ? (1ull << kind) & KINDS : 0;
}

static uint64_t switch_on(int kind)
{
	uint64_t bit = bit_of(kind);
	if (!bit)
		return 0;
	uint64_t before = atomic_fetch_or(&kinds_on, bit);
	if (!before)
		launches_wait_out();
	return bit & ~before;
}

// `bit`: what was switched on for a call that then failed.
static cupti_result switched_on(uint64_t bit, cupti_result result)
{
	if (result)
		atomic_fetch_and(&kinds_on, ~bit);
	return result;
}

static void switch_off(int kind)
{
	atomic_fetch_and(&kinds_on, ~bit_of(kind));
}

static cupti_result (*real_cuptiActivityEnable)(int kind);
static cupti_result (*real_cuptiActivityDisable)(int kind);
static cupti_result (*real_cuptiActivityEnableContext)(cu_context context, int kind);
static cupti_result (*real_cuptiActivityDisableContext)(cu_context context, int kind);
static cupti_result (*real_cuptiFinalize)(void);

static cupti_result hook_cuptiActivityEnable(int kind)
{
	return switched_on(switch_on(kind), REAL(cuptiActivityEnable)(kind));
}

static cupti_result hook_cuptiActivityEnableContext(cu_context context, int kind)
{
	return switched_on(switch_on(kind), REAL(cuptiActivityEnableContext)(context, kind));
}

static cupti_result hook_cuptiActivityDisable(int kind)
{
	cupti_result result = REAL(cuptiActivityDisable)(kind);
	switch_off(kind);
	return result;
}

static cupti_result hook_cuptiActivityDisableContext(cu_context context, int kind)
{
	cupti_result result = REAL(cuptiActivityDisableContext)(context, kind);
	switch_off(kind);
	return result;
}

static cupti_result hook_cuptiFinalize(void)
{
	cupti_result result = REAL(cuptiFinalize)();
	atomic_store(&kinds_on, 0);
	return result;
}

#define CUPTI "libcupti.so"
#define CUPTI_ENTRY(NAME) {#NAME, (void *)hook_##NAME, (void **)&real_##NAME, CUPTI},

static const struct hook table[] = {
	// clang-format off
	CUPTI_ENTRY(cuptiActivityEnable) CUPTI_ENTRY(cuptiActivityEnableContext)
	CUPTI_ENTRY(cuptiActivityDisable) CUPTI_ENTRY(cuptiActivityDisableContext)
	CUPTI_ENTRY(cuptiFinalize)
	// clang-format on
};
#define HOOKS (sizeof table / sizeof *table)

struct hook_list profiler_hooks(void)
{
	return (struct hook_list){table, HOOKS};
}

bool profilers_found(void)
{
	bool found = false;
	for (unsigned k = 0; k < HOOKS; k++) {
		void *real = module_symbol(CUPTI, table[k].name);
		if (real && real != __atomic_load_n(table[k].real, __ATOMIC_RELAXED)) {
			__atomic_store_n(table[k].real, real, __ATOMIC_RELEASE);
			found = true;
		}
	}
	return found;
}

void profilers_forget(void)
{
	atomic_store(&kinds_on, 0);
}
