// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Owns the maps that stacks are walked by; the programs that walk share them (unwind.h). */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "../abi/events.h"
#include "unwind.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";
