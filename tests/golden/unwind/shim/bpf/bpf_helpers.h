/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* libbpf's header, as far as the walker needs it, for a program of the host. */
#ifndef SHIM_BPF_HELPERS_H
#define SHIM_BPF_HELPERS_H

#define SEC(name)
#define __always_inline inline __attribute__((always_inline))
#define __noinline __attribute__((noinline))
#define __weak __attribute__((weak))
#define __uint(name, value) int(*name)[value]
#define __type(name, value) typeof(value) *name
#define __array(name, value) typeof(value) *name[]

struct task_struct;

void *bpf_map_lookup_elem(void *map, const void *key);
long bpf_map_update_elem(void *map, const void *key, const void *value, u64 flags);
long bpf_loop(u32 count, long (*step)(u32, void *), void *context, u64 flags);
long bpf_probe_read_user(void *to, u32 size, const void *from);
long bpf_get_stack(void *context, void *to, u32 size, u64 flags);
u64 bpf_ktime_get_ns(void);
u64 bpf_task_pt_regs(struct task_struct *task);
u64 bpf_get_current_task(void);

#endif
