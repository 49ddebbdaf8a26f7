// SPDX-License-Identifier: Apache-2.0
// Other users of CUPTI in this process, that trace the device (torch.profiler, JAX's profiler). Hooks note which kinds
// of record they switch on and off. While a kind of kernels or copies is on, nothing of ours goes into a stream, so
// that their trace is as it would be without us; and a trace of ours (trace.c) ends before theirs begins. From here
// CUPTI is called for them alone.
#include "cuda.h"
#include "cupti.h"

#define KINDS (1ull << 1 | 1ull << 2 | 1ull << 3 | 1ull << 10)
/* memcpy, memset, kernel, concurrent kernel: CUpti_ActivityKind, stable since CUDA 4 */

static _Atomic uint64_t kinds_on; // of KINDS, those that they have on in any context: a bit each
static _Atomic uint64_t everywhere_on; // of all kinds, those that they have on for all contexts

bool cuda_yields(void)
{
	return unlikely(atomic_load(&kinds_on) != 0);
}

static uint64_t bit_of(int kind)
{
	return kind >= 0 && kind < 64 ? (1ull << kind) & KINDS : 0;
}

// Note that a kind is about to be switched on. Returns its bit, if it was off.
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

// Take `bit` (of switch_on) back, if the call has failed.
static cupti_result switched_on(uint64_t bit, cupti_result result)
{
	if (result)
		atomic_fetch_and(&kinds_on, ~bit);
	return result;
}

static uint64_t any_bit_of(int kind)
{
	return kind >= 0 && kind < 64 ? 1ull << kind : 0;
}

bool profilers_have_on(int kind)
{
	return (atomic_load(&everywhere_on) & any_bit_of(kind)) != 0;
}

static void switch_off(int kind)
{
	atomic_fetch_and(&kinds_on, ~bit_of(kind));
}

static _Atomic uint64_t foreign_at_ns; // their last call that our trace would disturb; 0: none
static _Atomic(cupti_buffer_requested) their_requested;
static _Atomic(cupti_buffer_completed) their_completed;
static _Atomic bool known; // they were seen to switch a kind on or off

#define SETTLED_NS 700000000ull /* after such a call they may be about to switch a kind on */

bool profilers_trace(void)
{
	uint64_t at = atomic_load(&foreign_at_ns);
	return atomic_load(&kinds_on) || (at && now_ns() < at + SETTLED_NS);
}

bool profilers_are_known(void)
{
	return atomic_load(&known);
}

bool profilers_callbacks(cupti_buffer_requested *requested, cupti_buffer_completed *completed)
{
	*requested = atomic_load(&their_requested);
	*completed = atomic_load(&their_completed);
	return *requested && *completed;
}

// The time is noted before the trace is looked for, and a trace looks for the time after it is marked as running: so
// one of both sees the other.
static void they_come(void)
{
	atomic_store(&foreign_at_ns, now_ns());
	trace_step_aside();
}

static cupti_result (*real_cuptiActivityEnable)(int kind);
static cupti_result (*real_cuptiActivityDisable)(int kind);
static cupti_result (*real_cuptiActivityEnableContext)(cu_context context, int kind);
static cupti_result (*real_cuptiActivityDisableContext)(cu_context context, int kind);
static cupti_result (*real_cuptiActivityRegisterCallbacks)(cupti_buffer_requested requested,
							   cupti_buffer_completed completed);
static cupti_result (*real_cuptiSubscribe)(void **subscriber, void *callback, void *data);
static cupti_result (*real_cuptiFinalize)(void);

static cupti_result hook_cuptiActivityEnable(int kind)
{
	uint64_t bit = switch_on(kind);
	they_come();
	atomic_store(&known, true);
	// Noted only now that a trace of ours has ended: it leaves on what is noted here (disable in trace.c).
	uint64_t any = any_bit_of(kind);
	uint64_t before = atomic_fetch_or(&everywhere_on, any);
	cupti_result result = REAL(cuptiActivityEnable)(kind);
	if (result && !(before & any)) {
		atomic_fetch_and(&everywhere_on, ~any);
		if (any)
			REAL(cuptiActivityDisable)(kind); // our trace may have left it on for them
	}
	return switched_on(bit, result);
}

static cupti_result hook_cuptiActivityEnableContext(cu_context context, int kind)
{
	uint64_t bit = switch_on(kind);
	they_come();
	atomic_store(&known, true);
	return switched_on(bit, REAL(cuptiActivityEnableContext)(context, kind));
}

static cupti_result hook_cuptiActivityDisable(int kind)
{
	trace_step_aside();
	cupti_result result = REAL(cuptiActivityDisable)(kind);
	atomic_fetch_and(&everywhere_on, ~any_bit_of(kind));
	switch_off(kind);
	atomic_store(&known, true);
	return result;
}

static cupti_result hook_cuptiActivityDisableContext(cu_context context, int kind)
{
	trace_step_aside();
	cupti_result result = REAL(cuptiActivityDisableContext)(context, kind);
	switch_off(kind);
	atomic_store(&known, true);
	return result;
}

static cupti_result hook_cuptiActivityRegisterCallbacks(cupti_buffer_requested requested,
							cupti_buffer_completed completed)
{
	they_come();
	atomic_store(&their_requested, requested);
	atomic_store(&their_completed, completed);
	return REAL(cuptiActivityRegisterCallbacks)(requested, completed);
}

static cupti_result hook_cuptiSubscribe(void **subscriber, void *callback, void *data)
{
	they_come();
	return REAL(cuptiSubscribe)(subscriber, callback, data);
}

static cupti_result hook_cuptiFinalize(void)
{
	trace_step_aside();
	cupti_result result = REAL(cuptiFinalize)();
	atomic_store(&everywhere_on, 0);
	atomic_store(&kinds_on, 0);
	return result;
}

#define CUPTI_ENTRY(NAME) {#NAME, (void *)hook_##NAME, (void **)&real_##NAME, CUPTI},

static const struct hook table[] = {
	// clang-format off
	CUPTI_ENTRY(cuptiActivityEnable) CUPTI_ENTRY(cuptiActivityEnableContext)
	CUPTI_ENTRY(cuptiActivityDisable) CUPTI_ENTRY(cuptiActivityDisableContext)
	CUPTI_ENTRY(cuptiActivityRegisterCallbacks) CUPTI_ENTRY(cuptiSubscribe)
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
	atomic_store(&everywhere_on, 0);
	atomic_store(&known, false);
	atomic_store(&foreign_at_ns, 0);
	atomic_store(&their_requested, NULL);
	atomic_store(&their_completed, NULL);
}
