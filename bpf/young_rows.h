/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Rows of processes that began lately. A loop that starts processes makes a row of each, five thousand a second,
 * and each costs user space what a row of a process that lives costs. So a party (party.h) has separate rows for
 * a number of them in a window (share.h); what the others did counts in the row for all the rest.
 */
#ifndef SONDE_YOUNG_ROWS_H
#define SONDE_YOUNG_ROWS_H

#include "share.h"

#define YOUNG_NS 2000000000

const volatile u32 young_rows_of_one = 256;

/* Not the map of other shares: that of traced requests has one entry where there are none. */
SHARE_MAP(young_rows);

/* Whether a process of `party` that started at `start_ns` (CLOCK_BOOTTIME) may have a new row. In a recording of
 * given processes all of them may. Include task.h before it. */
static __always_inline bool may_have_row(u64 party, u64 start_ns)
{
	return filter_targets || !party || bpf_ktime_get_boot_ns() - start_ns >= YOUNG_NS ||
	       within_share_by(&young_rows, party, 0, young_rows_of_one);
}

#endif
