/* SPDX-License-Identifier: Apache-2.0 */
/* The dynamic linker's list, for the files that iterate over it: modules.c and pointer_scan.c. */
#ifndef SONDE_MODULES_H
#define SONDE_MODULES_H

#include "internal.h"

#pragma GCC visibility push(hidden)

/* Each loaded module, by dl_iterate_phdr: under the loader's lock, which keeps every dlopen() of the host
 * and some exceptions waiting. So nothing in `each` may take long. */
int modules_walk(int (*each)(struct dl_phdr_info *, size_t, void *), void *data);
const char *base_name(const char *path);
struct dynamic {
	const ElfW(Sym) * symbols;
	const char *strings;
	const uint32_t *hash, *gnu_hash;
	const ElfW(Rela) * plt, *rela;
	size_t plt_count, rela_count;
};
bool read_dynamic(const struct dl_phdr_info *i, struct dynamic *to);
/* Whether all of these bytes lie in a segment of the module with these rights (PF_…). */
bool module_holds(const struct dl_phdr_info *i, const void *at, size_t bytes, uint32_t rights);
/* Of its symbol number `n`; NULL where it has none. */
const char *symbol_name(const struct dl_phdr_info *i, const struct dynamic *d, uint32_t n);

#pragma GCC visibility pop
#endif
