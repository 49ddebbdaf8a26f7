/* SPDX-License-Identifier: Apache-2.0 */
/* The dynamic linker's list of modules, for the files that read it: modules.c, slots.c (most of the uses) and
 * pointer_scan.c. */
#ifndef SONDE_MODULES_H
#define SONDE_MODULES_H

#include "internal.h"

#pragma GCC visibility push(hidden)

/* Calls `each` for every loaded module, by dl_iterate_phdr. It runs under `modules_walking` (internal.h, which a
 * fork waits for) and under the loader's lock, which keeps every dlopen() of the host and some exceptions
 * waiting. So nothing in `each` may take long, or call modules_walk again. */
int modules_walk(int (*each)(struct dl_phdr_info *, size_t, void *), void *data);
const char *base_name(const char *path);
/* Tables of a module's PT_DYNAMIC segment; NULL where it has none. */
struct dynamic {
	const ElfW(Sym) * symbols;
	const char *strings;
	const uint32_t *hash, *gnu_hash;
	const ElfW(Rela) * plt, *rela; /* DT_JMPREL, DT_RELA */
	size_t plt_count, rela_count;
};
/* False: it has no symbols to look up. */
bool read_dynamic(const struct dl_phdr_info *i, struct dynamic *to);
/* Whether all of these bytes lie in one PT_LOAD segment of the module whose flags include `rights` (PF_R, PF_W,
 * PF_X). A module's tables may hold anything, so each pointer from them is checked here first. */
bool module_holds(const struct dl_phdr_info *i, const void *at, size_t bytes, uint32_t rights);
/* The name of symbol number `n`; NULL where there is none. */
const char *symbol_name(const struct dl_phdr_info *i, const struct dynamic *d, uint32_t n);

#pragma GCC visibility pop
#endif
