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
	int result = dl_iterate_phdr(each, data);
	pthread_mutex_unlock(&modules_walking);
	return result;
}

const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');
	return slash ? slash + 1 : path;
}

// How many bytes there are from here to the end of a segment of the module with these rights. The tables of a
// module that was packed or stripped may hold anything, and the dynamic linker reads few of them.
static size_t bytes_at(const struct dl_phdr_info *i, const void *at, uint32_t rights)
{
	uintptr_t address = (uintptr_t)at - i->dlpi_addr;
	for (int k = 0; k < i->dlpi_phnum; k++) {
		const ElfW(Phdr) *p = &i->dlpi_phdr[k];
		uintptr_t offset = address - p->p_vaddr;
		if (p->p_type == PT_LOAD && (p->p_flags & rights) == rights && offset < p->p_memsz)
			return p->p_memsz - offset;
	}
	return 0;
}

bool module_holds(const struct dl_phdr_info *i, const void *at, size_t bytes, uint32_t rights)
{
	return bytes_at(i, at, rights) >= bytes;
}

static bool holds(const struct dl_phdr_info *i, const void *at, size_t bytes)
{
	return module_holds(i, at, bytes, PF_R);
}

static const ElfW(Sym) * symbol(const struct dl_phdr_info *i, const struct dynamic *d, uint32_t n)
{
	const ElfW(Sym) *s = (void *)((uintptr_t)d->symbols + n * sizeof *s);
	return holds(i, s, sizeof *s) ? s : NULL;
}

const char *symbol_name(const struct dl_phdr_info *i, const struct dynamic *d, uint32_t n)
{
	const ElfW(Sym) *s = symbol(i, d, n);
	const char *name = s ? (void *)((uintptr_t)d->strings + s->st_name) : NULL;
	return name && memchr(name, 0, bytes_at(i, name, PF_R)) ? name : NULL;
}

bool read_dynamic(const struct dl_phdr_info *i, struct dynamic *to)
{
	const ElfW(Dyn) *d = NULL;
	memset(to, 0, sizeof *to);
	for (int k = 0; k < i->dlpi_phnum; k++)
		if (i->dlpi_phdr[k].p_type == PT_DYNAMIC)
			d = (void *)(i->dlpi_addr + i->dlpi_phdr[k].p_vaddr);
	for (; holds(i, d, sizeof *d) && d->d_tag; d++) {
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
	const ElfW(Sym) *s = symbol(i, d, n);
	const char *here = symbol_name(i, d, n);
	if (!here || s->st_shndx == SHN_UNDEF || ELF64_ST_TYPE(s->st_info) != STT_FUNC ||
	    strcmp(here, name))
		return NULL;
	return (void *)(i->dlpi_addr + s->st_value);
}

// A word of a hash table; false: the module has none there.
static bool read_hash(const struct dl_phdr_info *i, const uint32_t *table, uint64_t index,
		      uint32_t *to)
{
	const uint32_t *at = (void *)((uintptr_t)table + index * sizeof *at);
	if (!holds(i, at, sizeof *at))
		return false;
	*to = *at;
	return true;
}

static void *find_by_gnu_hash(const struct dl_phdr_info *i, const struct dynamic *d,
			      const char *name)
{
	uint32_t h = 5381, buckets, first, words, n, here;
	for (const char *c = name; *c; c++)
		h = h * 33 + (uint8_t)*c;
	if (!read_hash(i, d->gnu_hash, 0, &buckets) || !read_hash(i, d->gnu_hash, 1, &first) ||
	    !read_hash(i, d->gnu_hash, 2, &words) || !buckets)
		return NULL;
	uint64_t bucket = 4 + words * (sizeof(ElfW(Addr)) / 4), chain = bucket + buckets;
	if (!read_hash(i, d->gnu_hash, bucket + h % buckets, &n) || n < first)
		return NULL;
	for (; read_hash(i, d->gnu_hash, chain + (n - first), &here); n++) {
		void *found;
		if ((here | 1) == (h | 1) && (found = symbol_at(i, d, n, name)))
			return found;
		if (here & 1)
			return NULL;
	}
	return NULL;
}

static void *find_symbol(const struct dl_phdr_info *i, const char *name)
{
	struct dynamic d;
	void *found = NULL;
	uint32_t count;
	if (!read_dynamic(i, &d))
		return NULL;
	if (d.gnu_hash)
		return find_by_gnu_hash(i, &d, name);
	if (!d.hash || !read_hash(i, d.hash, 1, &count))
		return NULL;
	for (uint32_t n = 0; n < count && symbol(i, &d, n) && !found; n++)
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
		if (have > sizeof text / 2) { // keep what may be the first part of the mark
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
