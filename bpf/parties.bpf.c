// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Owns the map of subordinate ids (party.h), which all objects share that divide something by party. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "host_types.h"
#include "party.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";
