// SPDX-License-Identifier: Apache-2.0
// Loaded modules and their functions. Not dlsym: a thread that waits for the loader's lock while the
// host forks would leave the child with it.
#include "modules.h"

#include <elf.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

pthread_mutex_t modules_walking = PTHREAD_MUTEX_INITIALIZER;

int modules_walk(int (*each)(struct dl_phdr_info *, size_t, void *), void *data)
{
	pthread_mutex_lock(&modules_walking);
	int said = dl_iterate_phdr(each, data);
	pthread_mutex_unlock(&modules_walking);
	return said;
}

const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');
	return slash ? slash + 1 : path;
}

bool read_dynamic(const struct dl_phdr_info *i, struct dynamic *to)
{
	const ElfW(Dyn) *d = NULL;
	memset(to, 0, sizeof *to);
	for (int k = 0; k < i->dlpi_phnum; k++)
		if (i->dlpi_phdr[k].p_type == PT_DYNAMIC)
			d = (void *)(i->dlpi_addr + i->dlpi_phdr[k].p_vaddr);
	for (; d && d->d_tag; d++) {
		// The dynamic linker has made these addresses absolute, but for the vdso's.
		const void *at = (const void *)d->d_un.d_ptr;
		switch (d->d_tag) {
		case DT_SYMTAB:
			to->symbols = at;
			break;
		case DT_STRTAB:
			to->strings = at;
			break;
		case DT_HASH:
			to->hash = at;
			break;
		case DT_GNU_HASH:
			to->gnu_hash = at;
			break;
		case DT_JMPREL:
			to->plt = at;
			break;
		case DT_PLTRELSZ:
			to->plt_count = d->d_un.d_val / sizeof *to->plt;
			break;
		case DT_RELA:
			to->rela = at;
			break;
		case DT_RELASZ:
			to->rela_count = d->d_un.d_val / sizeof *to->rela;
			break;
		}
	}
	return to->symbols && to->strings && (uintptr_t)to->symbols >= i->dlpi_addr;
}

static void *symbol_at(const struct dl_phdr_info *i, const struct dynamic *d, uint32_t n,
		       const char *name)
{
	const ElfW(Sym) *s = &d->symbols[n];
	if (s->st_shndx == SHN_UNDEF || ELF64_ST_TYPE(s->st_info) != STT_FUNC ||
	    strcmp(d->strings + s->st_name, name))
		return NULL;
	return (void *)(i->dlpi_addr + s->st_value);
}

static void *find_by_gnu_hash(const struct dl_phdr_info *i, const struct dynamic *d,
			      const char *name)
{
	uint32_t h = 5381;
	for (const char *c = name; *c; c++)
		h = h * 33 + (uint8_t)*c;
	uint32_t buckets = d->gnu_hash[0], first = d->gnu_hash[1], words = d->gnu_hash[2];
	const uint32_t *bucket = d->gnu_hash + 4 + words * (sizeof(ElfW(Addr)) / 4);
	const uint32_t *chain = bucket + buckets;
	uint32_t n = buckets ? bucket[h % buckets] : 0;
	if (n < first)
		return NULL;
	for (;; n++) {
		uint32_t here = chain[n - first];
		void *found;
		if ((here | 1) == (h | 1) && (found = symbol_at(i, d, n, name)))
			return found;
		if (here & 1)
			return NULL;
	}
}

static void *find_symbol(const struct dl_phdr_info *i, const char *name)
{
	struct dynamic d;
	void *found = NULL;
	if (!read_dynamic(i, &d))
		return NULL;
	if (d.gnu_hash)
		return find_by_gnu_hash(i, &d, name);
	for (uint32_t n = 0; d.hash && n < d.hash[1] && !found; n++)
		found = symbol_at(i, &d, n, name);
	return found;
}

struct symbol_search {
	const char *module, *name;
	void *found;
	char *path;
	size_t size;
};

static int search_module(struct dl_phdr_info *i, size_t size, void *data)
{
	struct symbol_search *s = data;
	(void)size;
	if (!i->dlpi_name || strncmp(base_name(i->dlpi_name), s->module, strlen(s->module)))
		return 0;
	if (s->path) {
		if (strlen(i->dlpi_name) >= s->size)
			return 0;
		strcpy(s->path, i->dlpi_name);
		return 1;
	}
	s->found = find_symbol(i, s->name);
	return s->found != NULL;
}

void *module_symbol(const char *module, const char *name)
{
	struct symbol_search s = {.module = module, .name = name};
	modules_walk(search_module, &s);
	return s.found;
}

bool module_path(const char *module, char *path, size_t size)
{
	struct symbol_search s = {.module = module, .path = path, .size = size};
	return modules_walk(search_module, &s);
}

static int read_generation(struct dl_phdr_info *i, size_t size, void *data)
{
	if (size >= offsetof(struct dl_phdr_info, dlpi_subs) + sizeof i->dlpi_subs)
		*(uint64_t *)data = i->dlpi_adds * 1000003u + i->dlpi_subs;
	return 1;
}

uint64_t modules_generation(void)
{
	uint64_t generation = 0;
	modules_walk(read_generation, &generation);
	return generation;
}

bool other_copy_is_here(void)
{
	static char text[16384];
	static const char mark[] = "/memfd:" INJECT_MEMFD " (deleted)\n";
	size_t have = 0;
	bool found = false;
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC);
	for (long got; !found && fd >= 0; have += (size_t)got) {
		if (have > sizeof text / 2) { // keep what may be the begin of the mark
			memmove(text, text + have - sizeof mark, sizeof mark);
			have = sizeof mark;
		}
		got = syscall(SYS_read, fd, text + have, sizeof text - have);
		if (got <= 0)
			break;
		found = memmem(text, have + (size_t)got, mark, sizeof mark - 1) != NULL;
	}
	if (fd >= 0)
		syscall(SYS_close, fd);
	return found;
}
