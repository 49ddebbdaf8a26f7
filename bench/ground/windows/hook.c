// SPDX-License-Identifier: Apache-2.0
// The launch hook, put into import tables.
#include "windows.h"

#include <sys/syscall.h>
#include <unistd.h>

#define HOOK_RING 65536

struct hook_record {
	uint64_t t, tid, from, function, a, b, c, seq;
};

static struct hook_record hook_ring[HOOK_RING];
atomic_ullong hook_head;
int ground_hook_level;
static __thread uint64_t my_tid;

__attribute__((used, noinline)) void ground_note(uint64_t function, uint64_t from)
{
	if (!my_tid)
		my_tid = syscall(SYS_gettid);
	uint64_t seq = atomic_fetch_add_explicit(&hook_head, 1, memory_order_relaxed);
	struct hook_record *r = &hook_ring[seq % HOOK_RING];
	r->t = ground_hook_level == 1 ? now_ns() : 0;
	r->tid = my_tid, r->from = from, r->function = function, r->a = seq, r->b = 0, r->c = 0;
	atomic_store_explicit((_Atomic uint64_t *)&r->seq, seq + 1, memory_order_release);
}

// The arguments pass through untouched, whatever their number: save, note, restore, jump.
#define LAUNCH(f)                                                                                  \
	void *real_##f __attribute__((visibility("hidden")));                                      \
	void hook_##f(void) __attribute__((visibility("hidden")));                                 \
	__asm__(".text\n.hidden hook_" #f "\n.globl hook_" #f "\nhook_" #f ":\n"                   \
		"push %rdi\npush %rsi\npush %rdx\npush %rcx\npush %r8\npush %r9\nsub $8,%rsp\n"    \
		"mov 56(%rsp),%rsi\ncall ground_note@PLT\n"                                        \
		"add $8,%rsp\npop %r9\npop %r8\npop %rcx\npop %rdx\npop %rsi\npop %rdi\n"          \
		"jmp *real_" #f "(%rip)\n");
LAUNCH(__cudaLaunchKernel)
LAUNCH(cudaLaunchKernel)
LAUNCH(cudaLaunchKernelExC)
LAUNCH(cudaGraphLaunch)

void ground_hook(int level)
{
	ground_hook_level = level ? level : ground_hook_level;
#define HOOK(f) {#f, level ? (void *)hook_##f : NULL, &real_##f},
	// clang-format off
	struct patch p[] = {
		HOOK(__cudaLaunchKernel) HOOK(cudaLaunchKernel)
		HOOK(cudaLaunchKernelExC) HOOK(cudaGraphLaunch)
		{NULL, NULL, NULL}};
	// clang-format on
	dl_iterate_phdr(patch_object, p);
}
