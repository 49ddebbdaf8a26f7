/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * How closely each process is sampled. User space chooses some by what all processes use, and writes the
 * map: of processes in it waits are counted and samples taken, with stacks or without; of others neither.
 * It chooses no more than have room. Where `chosen_only` is not set, all processes have stacks.
 */
#ifndef SONDE_CHOSEN_H
#define SONDE_CHOSEN_H

#define SONDE_MAX_CHOSEN 512

const volatile bool chosen_only = false;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SONDE_MAX_CHOSEN);
	__type(key, u32);
	__type(value, u8);
} chosen SEC(".maps");

enum closeness { NOT_CHOSEN, WITHOUT_STACKS, WITH_STACKS }; /* values of `chosen` */

static __always_inline enum closeness closeness_of(u32 tgid)
{
	u8 *found;

	if (!chosen_only)
		return WITH_STACKS;
	found = bpf_map_lookup_elem(&chosen, &tgid);
	return found ? *found : NOT_CHOSEN;
}

#endif
