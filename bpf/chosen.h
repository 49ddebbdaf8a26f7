/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Processes that are looked at closely, chosen by user space from what all processes use: of others no
 * wait is counted and no sample taken; and those of which stacks are taken, too. Where `chosen_only` is
 * not set, both is every process.
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

enum closeness { NOT_CHOSEN, WITHOUT_STACKS, WITH_STACKS };

static __always_inline enum closeness closeness_of(u32 tgid)
{
	u8 *found;

	if (!chosen_only)
		return WITH_STACKS;
	found = bpf_map_lookup_elem(&chosen, &tgid);
	return found ? *found : NOT_CHOSEN;
}

#endif
