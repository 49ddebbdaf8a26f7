// SPDX-License-Identifier: Apache-2.0
// The gate: a kernel of ours that waits until the whole pair behind it is in the stream, or 40 us are over (GATE_NS
// of cuda_pair.c): it ends by itself whatever becomes of the host's thread. A pair whose gate timed out is not
// used. And the bias: what a pair measures of a kernel that does nothing, by trials behind the first gates.
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

// Queue a pair around an empty kernel right behind the program's, while the gate is shut: so no time of the host is in
// it. In the program's own stream and thread: on an H200 replays took 15 % longer ever after our thread had launched
// kernels into a stream that it had made.
void bias_enqueue(struct pool *p, const struct sample *behind, cu_stream stream)
{
	struct calibration *c = &p->calibration;
	uint32_t is_free = SAMPLE_FREE;
	if (atomic_load_explicit(&c->state, memory_order_relaxed) != SAMPLE_FREE ||
	    !atomic_compare_exchange_strong(&c->state, &is_free, SAMPLE_TAKEN))
		return;
	bool whole = driver.cuEventRecord(c->begin, stream) == CU_OK &&
		     driver.cuLaunchKernel(p->nothing, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) ==
			     CU_OK &&
		     driver.cuEventRecord(c->end, stream) == CU_OK;
	c->gate = behind->gate;
	// One that is not whole ends the trials: what was taken off so far stays.
	atomic_store(&c->state, whole ? SAMPLE_QUEUED : SAMPLE_TAKEN);
}

// By our thread, in a step.
void bias_read(struct pool *p)
{
	struct calibration *c = &p->calibration;
	float ms = 0;
	if (atomic_load(&c->state) != SAMPLE_QUEUED)
		return;
	cu_result r = driver.cuEventQuery(c->end);
	if (r == CU_NOT_READY)
		return;
	if (r != CU_OK || driver.cuEventElapsedTime(&ms, c->begin, c->end) != CU_OK) {
		atomic_store(&c->state, SAMPLE_TAKEN);
		return;
	}
	if (!c->gate->timed_out)
		c->found[c->count++] = (uint32_t)(ms > 0 ? ms * 1e6f : 0);
	bool goes_on = c->count < BIAS_TRIALS && ++c->tries < MOST_BIAS_TRIALS;
	atomic_store(&c->state, goes_on ? SAMPLE_FREE : SAMPLE_TAKEN);
	if (c->count < BIAS_TRIALS)
		return;
	// Other work of the device only makes a pair longer: so not the median.
	uint32_t pair_ns = lower_quartile(c->found, BIAS_TRIALS);
	p->bias_ns = pair_ns > NULL_KERNEL_NS ? pair_ns - NULL_KERNEL_NS : PAIR_NS;
	SET(bias_ns, p->bias_ns);
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
		driver.cuCtxPopCurrent_v2(&popped);
	}
	if (p->gate && !step_is_unwanted())
		atomic_store(&p->calibration.state, SAMPLE_FREE);
	if (step_is_unwanted()) // loaded in part
		atomic_store(&p->gone, 1);
	atomic_store_explicit(&p->gating, GATE_READY, memory_order_release);
}
