/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Rows that are made only within the share of a party (party.h). A process makes as many rows as it likes, of calls
 * that no kernel knows or of threads that map a page: half of the rows are first come, first served, and then each
 * party has its share. The machine's root and the processes of a recording of given ones have all. Who a row is for
 * is looked up only where it is new. Include task.h before it.
 */
#ifndef SONDE_ROW_SHARE_H
#define SONDE_ROW_SHARE_H

#include "young_rows.h"

/* `what` of within_share, and a number that stands for all parties: none has it. */
enum shared_rows { ROWS, SPARE };
#define EVERYBODY (~0ULL)

/* New rows in a window (share.h): of all, first come, first served; then of each party. */
const volatile u64 free_rows = 4096;
const volatile u64 most_rows_of_one_party = 512;
#define FREE_SPARE_ROWS 512
#define MOST_SPARE_ROWS_OF_ONE_PARTY 128

static __always_inline bool may_make(u64 party, u64 what, u64 free, u64 most)
{
	return filter_targets || !party || within_share(EVERYBODY, what, free) ||
	       within_share(party, what, most);
}

/* The row under `key`, of a process of `party` that started at `start_ns`; NULL where there is no room or share. */
static __always_inline void *fair_row(void *rows_in_use, const void *key, const void *zero,
				      u64 party, u64 start_ns)
{
	void *row = known_row(rows_in_use, key);

	if (row || !may_have_row(party, start_ns) ||
	    !may_make(party, ROWS, free_rows, most_rows_of_one_party))
		return row;
	return find_row(rows_in_use, key, zero);
}

/* The coarser row under `key`, else the one for all the rest, whose key is `rest`: all zero. A young process has
 * one only where it has it already. */
static __always_inline void *fair_spare_row(void *spare_in_use, const void *key, const void *zero,
					    const void *rest, u64 party, u64 start_ns)
{
	if (known_row(spare_in_use, key) ||
	    (may_have_row(party, start_ns) &&
	     may_make(party, SPARE, FREE_SPARE_ROWS, MOST_SPARE_ROWS_OF_ONE_PARTY)))
		return spare_row_of(spare_in_use, key, zero, rest);
	return rest_row_of(spare_in_use, rest);
}

#endif
