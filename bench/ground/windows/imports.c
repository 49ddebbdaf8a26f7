// SPDX-License-Identifier: Apache-2.0
// Import tables of every loaded object: put our functions there, or the real ones back.
#include "windows.h"

#include <dlfcn.h>
#include <elf.h>
#include <string.h>
#include <sys/mman.h>

unsigned patched_slots;

static void patch_table(const struct dl_phdr_info *i, const ElfW(Rela) * r, size_t n,
			const ElfW(Sym) * sym, const char *str, const struct patch *p)
{
	for (size_t k = 0; k < n; k++) {
		unsigned type = ELF64_R_TYPE(r[k].r_info);
		if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT)
			continue;
		const char *name = str + sym[ELF64_R_SYM(r[k].r_info)].st_name;
		for (const struct patch *q = p; q->name; q++) {
			if (strcmp(q->name, name))
				continue;
			void **slot = (void **)(i->dlpi_addr + r[k].r_offset);
			uintptr_t page = (uintptr_t)slot & ~4095ul;
			if (!*q->real)
				*q->real = dlsym(RTLD_DEFAULT, name);
			if (!*q->real)
				*q->real =
					*slot; // a lazily bound slot would hold its stub; these are bound now
			if (mprotect((void *)page, 4096, PROT_READ | PROT_WRITE))
				continue;
			__atomic_store_n(slot, q->ours ? q->ours : *q->real, __ATOMIC_RELEASE);
			patched_slots++;
		}
	}
}

int patch_object(struct dl_phdr_info *i, size_t size, void *data)
{
	(void)size;
	Dl_info me;
	if (dladdr((void *)patch_object, &me) && i->dlpi_addr == (uintptr_t)me.dli_fbase)
		return 0;
	if (i->dlpi_name && (strstr(i->dlpi_name, "libcupti") ||
			     strstr(i->dlpi_name, "libcudart") || strstr(i->dlpi_name, "vdso")))
		return 0;
	const ElfW(Dyn) *d = NULL;
	for (int k = 0; k < i->dlpi_phnum; k++)
		if (i->dlpi_phdr[k].p_type == PT_DYNAMIC)
			d = (void *)(i->dlpi_addr + i->dlpi_phdr[k].p_vaddr);
	const ElfW(Rela) *plt = NULL, *rela = NULL;
	const ElfW(Sym) *sym = NULL;
	const char *str = NULL;
	size_t plt_n = 0, rela_n = 0;
	for (; d && d->d_tag; d++) {
		if (d->d_tag == DT_JMPREL)
			plt = (void *)d->d_un.d_ptr;
		if (d->d_tag == DT_PLTRELSZ)
			plt_n = d->d_un.d_val / sizeof *plt;
		if (d->d_tag == DT_RELA)
			rela = (void *)d->d_un.d_ptr;
		if (d->d_tag == DT_RELASZ)
			rela_n = d->d_un.d_val / sizeof *rela;
		if (d->d_tag == DT_SYMTAB)
			sym = (void *)d->d_un.d_ptr;
		if (d->d_tag == DT_STRTAB)
			str = (void *)d->d_un.d_ptr;
	}
	if (!sym || !str)
		return 0;
	if (plt)
		patch_table(i, plt, plt_n, sym, str, data);
	if (rela)
		patch_table(i, rela, rela_n, sym, str, data);
	return 0;
}
