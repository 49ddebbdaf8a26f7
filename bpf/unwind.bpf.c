// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Owns the maps that all programs share which take stacks: those that stacks are walked by (unwind.h) and
 * kept in (stack.h), that of the processes whose stacks are taken (chosen.h), and those of traced requests
 * (trace_context.h). So the objects of these
 * programs need not wait for one another while they are loaded.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#include "stack.h"
#include "task.h"
#include "chosen.h"
#include "trace_context.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";
