// SPDX-License-Identifier: Apache-2.0
// The gate: a kernel of ours that waits until the whole pair behind it is in the stream, or 40 us are over (GATE_NS
// of cuda_pair.c): it ends by itself whatever becomes of the host's thread. A pair whose gate timed out is not
// used. And the bias: what a pair measures of a kernel that does nothing.
#include "cuda.h"

/* The part of an empty kernel's pair that is the kernel's time, not bias. Chosen by trial: with it, pairs around
 * kernels of 0.9 to 160 us agreed with CUPTI to within 0.5 us (short kernels) and 0.9 us (long ones) on an H200. */
#define NULL_KERNEL_NS 400

static const char gate_code[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry sonde_gate(.param .u64 word, .param .u64 limit)\n"
	"{\n"
	".reg .b64 %a, %from, %now, %limit; .reg .b32 %open; .reg .pred %p;\n"
	"ld.param.u64 %a, [word];\n"
	"ld.param.u64 %limit, [limit];\n"
	"mov.u64 %from, %globaltimer;\n"
	"AGAIN:\n"
	"ld.volatile.global.u32 %open, [%a];\n"
	"setp.ne.u32 %p, %open, 0;\n"
	"@%p bra DONE;\n"
	"mov.u64 %now, %globaltimer;\n"
	"sub.u64 %now, %now, %from;\n"
	"setp.lt.u64 %p, %now, %limit;\n"
	"@%p bra AGAIN;\n"
	"mov.u32 %open, 1;\n"
	"st.volatile.global.u32 [%a+4], %open;\n"
	"DONE:\n"
	"ret;\n"
	"}\n"
	".visible .entry sonde_nothing()\n"
	"{\n"
	"ret;\n"
	"}\n";

static uint32_t lower_quartile(uint32_t *of, unsigned n)
{
	for (unsigned i = 1; i < n; i++)
		for (unsigned k = i; k && of[k - 1] > of[k]; k--) {
			uint32_t swap = of[k];
			of[k] = of[k - 1], of[k - 1] = swap;
		}
	return n ? of[n / 4] : 0;
}

// What a pair measures of an empty kernel, without the time of that kernel. Other work of the device only makes a pair
// longer: so the lower quartile of some, not their median.
static uint32_t measure_bias(struct pool *p, bool gated)
{
	enum { ROUNDS = 21 };
	uint32_t found[ROUNDS];
	unsigned n = 0;
	cu_stream stream;
	struct sample *s = pool_take(p);
	if (!s)
		return 0;
	if (!p->nothing || (gated && !p->gate) ||
	    driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING_FLAG))
		goto out;
	for (int i = 0; i < ROUNDS && !step_is_unwanted(); i++) {
		float ms = 0;
		if (!pair_enqueue_begin(p, s, stream, gated))
			break;
		bool ok = driver.cuLaunchKernel(p->nothing, 1, 1, 1, 1, 1, 1, 0, stream, NULL,
						NULL) == CU_OK;
		pair_enqueue_end(s, stream);
		uint64_t until = now_ns() + 100000000u; // a device that is busy
		while (!step_is_unwanted() && driver.cuEventQuery(s->end) == CU_NOT_READY &&
		       now_ns() < until)
			nap(20000);
		if (ok && !step_is_unwanted() &&
		    !driver.cuEventElapsedTime(&ms, s->begin, s->end) &&
		    !(s->gated && s->gate->timed_out))
			found[n++] = (uint32_t)(ms * 1e6f);
	}
	if (!step_is_unwanted()) // else the stream is destroyed with its context
		driver.cuStreamDestroy_v2(stream);
out:
	pool_give_back(s);
	uint32_t pair_ns = lower_quartile(found, n);
	return pair_ns > NULL_KERNEL_NS ? pair_ns - NULL_KERNEL_NS : 0;
}

static void load(struct pool *p)
{
	cu_module module;
	struct gate_state *states;
	if (driver.cuModuleLoadData(&module, gate_code) ||
	    driver.cuModuleGetFunction(&p->nothing, module, "sonde_nothing") ||
	    driver.cuModuleGetFunction(&p->gate, module, "sonde_gate"))
		p->gate = NULL;
	else if (driver.cuMemHostAlloc((void **)&states, POOL_SAMPLES * 64, CU_HOST_PORTABLE))
		p->gate = NULL;
	for (int k = 0; p->gate && k < POOL_SAMPLES; k++)
		p->samples[k].gate = (void *)((char *)states + 64 * k);
}

void gate_make(struct pool *p)
{
	cu_context popped;
	if (driver.cuCtxPushCurrent_v2(p->context) == CU_OK) {
		load(p);
		uint32_t gated_ns = measure_bias(p, true);
		p->bias_ns = gated_ns ? gated_ns : PAIR_NS;
		p->bias_ungated_ns = measure_bias(p, false);
		SET(bias_ns, p->bias_ns);
		driver.cuCtxPopCurrent_v2(&popped);
	}
	if (step_is_unwanted()) // measured in part
		atomic_store(&p->gone, 1);
	atomic_store_explicit(&p->gating, GATE_READY, memory_order_release);
}
