// SPDX-License-Identifier: Apache-2.0
// Loaded modules: their functions, and the words of their data through which they call device
// libraries. Not dlsym: a thread that waits for the loader's lock while the host forks would leave the
// child with it.
#include "own.h"

#include <elf.h>
#include <fcntl.h>
#include <string.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct dynamic {
	const ElfW(Sym) * symbols;
	const char *strings;
	const uint32_t *hash, *gnu_hash;
	const ElfW(Rela) * plt, *rela;
	size_t plt_count, rela_count;
};

static const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');
	return slash ? slash + 1 : path;
}

static bool read_dynamic(const struct dl_phdr_info *i, struct dynamic *to)
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
	dl_iterate_phdr(search_module, &s);
	return s.found;
}

bool module_path(const char *module, char *path, size_t size)
{
	struct symbol_search s = {.module = module, .path = path, .size = size};
	return dl_iterate_phdr(search_module, &s);
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
	dl_iterate_phdr(read_generation, &generation);
	return generation;
}

// ---- which of them were looked at ------------------------------------------------------------------

#define MAX_LOOKED 8192u /* a power of two; those beyond are looked at each time */
static uintptr_t looked_at[MAX_LOOKED];

static uintptr_t *looked_slot(uintptr_t base)
{
	for (uint32_t i = (uint32_t)(base >> 12) * 2654435761u % MAX_LOOKED, n = 0; n < 32;
	     n++, i = (i + 1) % MAX_LOOKED)
		if (!looked_at[i] || looked_at[i] == base)
			return &looked_at[i];
	return NULL;
}

static bool was_looked_at(uintptr_t base)
{
	uintptr_t *slot = looked_slot(base);
	return slot && *slot == base;
}

static int note_looked(struct dl_phdr_info *i, size_t size, void *data)
{
	uintptr_t *slot = looked_slot(i->dlpi_addr);
	(void)size;
	(void)data;
	if (slot)
		*slot = i->dlpi_addr;
	return 0;
}

void modules_looked(void)
{
	dl_iterate_phdr(note_looked, NULL);
}

void modules_forget(void)
{
	memset(looked_at, 0, sizeof looked_at);
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

// ---- putting ours in, or the real ones back -------------------------------------------------------

#define MOST_RANGES 3	   /* libraries whose functions are hooked at once, and one to spare */
#define NEAR (512ul << 20) /* of one library */

struct change {
	const struct hooks *hooks;
	bool in, only_new;
	struct range {
		uintptr_t low, high;
	} theirs[MOST_RANGES], ours; // of the functions whose addresses are looked for
	unsigned ranges;
	unsigned leading_to_us;
};

struct protection {
	uintptr_t start, end; // read-only after relocation
};

// Adding nothing to it, in the kernel, which answers with an error where it must not be written.
static bool is_writable(void **word)
{
	uint32_t none = 0;
	return syscall(SYS_futex, &none, FUTEX_WAKE_OP_PRIVATE, 0, 0, word,
		       FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0)) >= 0;
}

static bool store_word(void **word, void *value, struct protection relro)
{
	uintptr_t at = (uintptr_t)word;
	if (is_writable(word)) {
		__atomic_store_n(word, value, __ATOMIC_RELEASE);
		return true;
	}
	if (at < relro.start || at >= relro.end)
		return false;
	uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE), page = at & ~(page_bytes - 1);
	if (mprotect((void *)page, page_bytes, PROT_READ | PROT_WRITE))
		return false;
	__atomic_store_n(word, value, __ATOMIC_RELEASE);
	mprotect((void *)page, page_bytes, PROT_READ);
	return true;
}

static void change_word(void **word, void *value, struct change *c, struct protection relro)
{
	for (unsigned k = 0; k < c->hooks->count; k++) {
		const struct hook *h = &c->hooks->table[k];
		if (*h->real && value == (c->in ? *h->real : h->ours)) {
			c->leading_to_us +=
				store_word(word, c->in ? h->ours : *h->real, relro) && c->in;
			return;
		}
		c->leading_to_us += c->in && value == h->ours;
	}
}

static bool is_within(struct range r, uintptr_t word)
{
	return word - r.low <= r.high - r.low;
}

static bool is_wanted(const struct change *c, uintptr_t word)
{
	for (unsigned k = 0; k < c->ranges; k++)
		if (unlikely(is_within(c->theirs[k], word)))
			return true;
	return unlikely(is_within(c->ours, word));
}

// Words that hold a real function's address: bound imports, and the tables that a runtime fills from
// cuGetProcAddress or dlsym for itself. Read through the kernel, which answers with an error where the
// program has taken the right to read away.
static void change_segment(struct dl_phdr_info *i, const ElfW(Phdr) * p, struct change *c,
			   struct protection relro)
{
	static uintptr_t copy[8192];
	uintptr_t at = (i->dlpi_addr + p->p_vaddr + 7) & ~7ul;
	uintptr_t end = (i->dlpi_addr + p->p_vaddr + p->p_memsz) & ~7ul;
	while (at < end) {
		// To the end of a page, so that one that cannot be read hides no other.
		size_t want = sizeof copy - (at & 4095);
		struct iovec to = {copy, want < end - at ? want : end - at};
		struct iovec from = {(void *)at, to.iov_len};
		long got = syscall(SYS_process_vm_readv, getpid(), &to, 1, &from, 1, 0);
		if (got <= 0) {
			at = (at & ~4095ul) + 4096;
			continue;
		}
		for (long n = 0; n < got / 8; n++)
			if (is_wanted(c, copy[n]))
				change_word((void **)(at + 8 * (uintptr_t)n), (void *)copy[n], c,
					    relro);
		at += (uintptr_t)got & ~7ul;
		if (got < 8)
			at = (at & ~4095ul) + 4096;
	}
}

// Imports not bound yet: a call would end in the real function, past us.
static void bind_imports(struct dl_phdr_info *i, const struct dynamic *d, struct change *c,
			 struct protection relro, uintptr_t low, uintptr_t high)
{
	for (size_t k = 0; k < d->plt_count; k++) {
		const ElfW(Rela) *r = &d->plt[k];
		if (ELF64_R_TYPE(r->r_info) != R_X86_64_JUMP_SLOT)
			continue;
		const char *name = d->strings + d->symbols[ELF64_R_SYM(r->r_info)].st_name;
		void **word = (void **)(i->dlpi_addr + r->r_offset);
		uintptr_t value = (uintptr_t)__atomic_load_n(word, __ATOMIC_RELAXED);
		if (value < low || value >= high) // bound, be it to somebody else's: theirs
			continue;
		for (unsigned n = 0; n < c->hooks->count; n++) {
			const struct hook *h = &c->hooks->table[n];
			if (*h->real && !strcmp(h->name, name)) {
				c->leading_to_us += store_word(word, h->ours, relro);
			}
		}
	}
}

static int change_module(struct dl_phdr_info *i, size_t size, void *data)
{
	struct change *c = data;
	struct protection relro = {0, 0};
	struct dynamic d;
	uintptr_t low = UINTPTR_MAX, high = 0;
	(void)size;
	if (c->only_new && was_looked_at(i->dlpi_addr))
		return 0;
	const char *name = base_name(i->dlpi_name ? i->dlpi_name : "");
	for (const char *const *s = c->hooks->skip; *s; s++)
		if (strstr(name, *s))
			return 0;
	for (int k = 0; k < i->dlpi_phnum; k++) {
		const ElfW(Phdr) *p = &i->dlpi_phdr[k];
		uintptr_t at = i->dlpi_addr + p->p_vaddr;
		if (p->p_type == PT_GNU_RELRO)
			relro = (struct protection){at & ~4095ul, at + p->p_memsz};
		if (p->p_type == PT_LOAD && at < low)
			low = at;
		if (p->p_type == PT_LOAD && at + p->p_memsz > high)
			high = at + p->p_memsz;
	}
	if ((uintptr_t)change_module >= low && (uintptr_t)change_module < high)
		return 0; // our own words must stay what they are
	for (int k = 0; k < i->dlpi_phnum; k++) {
		const ElfW(Phdr) *p = &i->dlpi_phdr[k];
		if (p->p_type == PT_LOAD && (p->p_flags & (PF_R | PF_W)) == (PF_R | PF_W))
			change_segment(i, p, c, relro);
	}
	if (c->in && read_dynamic(i, &d) && d.plt)
		bind_imports(i, &d, c, relro, low, high);
	return 0;
}

static const char *const never[] = {"linux-vdso", "ld-linux", "libc.so", NULL};

static void widen(struct range *r, void *word)
{
	if ((uintptr_t)word < r->low)
		r->low = (uintptr_t)word;
	if ((uintptr_t)word > r->high)
		r->high = (uintptr_t)word;
}

// To the range of its library, that the words between two libraries are not all looked at closely.
static void widen_near(struct change *c, void *word)
{
	uintptr_t at = (uintptr_t)word;
	unsigned k = 0;
	while (k < c->ranges && (at + NEAR < c->theirs[k].low || at > c->theirs[k].high + NEAR))
		k++;
	if (k == MOST_RANGES)
		k--;
	else if (k == c->ranges)
		c->theirs[c->ranges++] = (struct range){at, at};
	widen(&c->theirs[k], word);
}

unsigned hooks_apply(const struct hooks *hooks, bool in, bool only_new)
{
	struct hooks all = *hooks;
	if (!all.skip)
		all.skip = never;
	struct change c = {
		.hooks = &all,
		.in = in,
		.only_new = only_new,
		.ours = {UINTPTR_MAX, 0},
	};
	for (unsigned k = 0; k < hooks->count; k++) {
		const struct hook *h = &hooks->table[k];
		if (!*h->real)
			continue;
		widen_near(&c, in ? *h->real : h->ours);
		widen(&c.ours, h->ours);
	}
	if (c.ranges)
		dl_iterate_phdr(change_module, &c);
	return c.leading_to_us;
}
