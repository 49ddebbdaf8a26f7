// SPDX-License-Identifier: Apache-2.0
// Pointer slots: places in modules' data that hold a device function's address. These are bound imports,
// and tables that a runtime fills from cuGetProcAddress or dlsym. Modules are listed under the loader's
// lock, read without it, and written under it again, if the module is still there.
#include "modules.h"

#include <elf.h>
#include <fcntl.h>
#include <string.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The budget of one scan: what is left over is read in the next one, and counted (looks_cut). */
#define SCAN_BYTES (64ul << 20)
#define SCAN_CPU_NS 20000000ull
#define LARGE 16u /* times that budget, in the first scans and when hooks are taken out */
#define HEAD_BYTES (16ul << 20) /* of each segment, read before the rest of any */
#define PAGEMAP_PAGES 4096u	/* pages looked up at once in /proc/self/pagemap */
#define MOST_UNITS 8192u	/* a power of two */

#define MOST_RANGES 3	   /* libraries whose functions are hooked at once, and one to spare */
#define NEAR (512ul << 20) /* functions at most this far apart are taken for one library's */

/* One pass over the slots: put hooks in, or out. */
struct change {
	const struct hooks *hooks;
	bool in;
	// Addresses that a slot is searched for: of the functions to be replaced (real ones, or, when hooks are
	// taken out, hooks), and of the hooks.
	struct range {
		uintptr_t low, high;
	} theirs[MOST_RANGES], ours;
	unsigned ranges;
	unsigned leading_to_us; // slots that hold a hook now
};

struct protection {
	uintptr_t start, end; // read-only after relocation
};

// Whether it may be written: the kernel adds 0 to it (FUTEX_WAKE_OP), and answers with an error, no signal, where not.
static bool is_writable(void **slot)
{
	uint32_t none = 0;
	return syscall(SYS_futex, &none, FUTEX_WAKE_OP_PRIVATE, 0, 0, slot,
		       FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0)) >= 0;
}

// Only if it still holds what was read: the host runs meanwhile.
bool pointer_store(void **slot, void *before, void *value, uintptr_t relro_start,
		   uintptr_t relro_end)
{
	uintptr_t at = (uintptr_t)slot;
	if (is_writable(slot))
		return __atomic_compare_exchange_n(slot, &before, value, false, __ATOMIC_RELEASE,
						   __ATOMIC_RELAXED);
	if (at < relro_start || at >= relro_end)
		return false;
	uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE), page = at & ~(page_bytes - 1);
	if (mprotect((void *)page, page_bytes, PROT_READ | PROT_WRITE))
		return false;
	bool stored = __atomic_compare_exchange_n(slot, &before, value, false, __ATOMIC_RELEASE,
						  __ATOMIC_RELAXED);
	mprotect((void *)page, page_bytes, PROT_READ);
	return stored;
}

static bool store_pointer(void **slot, void *before, void *value, struct protection relro)
{
	return pointer_store(slot, before, value, relro.start, relro.end);
}

static bool is_within(struct range r, uintptr_t slot)
{
	return slot - r.low <= r.high - r.low;
}

static bool is_wanted(const struct change *c, uintptr_t slot)
{
	for (unsigned k = 0; k < c->ranges; k++)
		if (unlikely(is_within(c->theirs[k], slot)))
			return true;
	return unlikely(is_within(c->ours, slot));
}

// ---- what is read -------------------------------------------------------------------------------

/* A part of a module's writable data. */
struct unit {
	uintptr_t start, end, base; /* base: the module's load address */
	struct protection relro;
	bool tail; /* what follows the first HEAD_BYTES of its segment */
};
static struct unit units[MOST_UNITS];
static unsigned unit_count;

/* How far the unit that begins at `start` was read, by backend: a hash table. */
static struct progress {
	uintptr_t start, at;
	uint32_t round; /* of another round: out of date */
} progress[2][MOST_UNITS];
static uint32_t rounds[2]; // by backend; one more whenever all is to be read again

static struct scan_budget {
	uint64_t bytes, until_cpu_ns; /* what is left; CPU time of this thread at its end */
	bool cut;		      /* it is spent, and something was not read */
	int pagemap;		      /* descriptor of /proc/self/pagemap; -1: none */
} budget = {.pagemap = -1};

static uint64_t cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void scan_begin(bool large)
{
	unsigned times = large ? LARGE : 1;
	budget = (struct scan_budget){
		.bytes = SCAN_BYTES * times,
		.until_cpu_ns = cpu_ns() + SCAN_CPU_NS * times,
		.pagemap = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/pagemap",
					O_RDONLY | O_CLOEXEC),
	};
}

bool scan_end(void)
{
	if (budget.pagemap >= 0)
		syscall(SYS_close, budget.pagemap);
	budget.pagemap = -1;
	if (budget.cut)
		COUNT(looks_cut, 1);
	return budget.cut;
}

static bool is_spent(void)
{
	budget.cut |= !budget.bytes || cpu_ns() > budget.until_cpu_ns;
	return budget.cut;
}

// Where it is noted how far a unit was read: its entry, or one that this round has no use for. NULL: there is none, and
// the unit is read again each time.
static struct progress *progress_of(const struct change *c, uintptr_t start)
{
	struct progress *all = progress[c->hooks->number], *room = NULL;
	uint32_t round = rounds[c->hooks->number];
	uint32_t i = (uint32_t)(start >> 3) * 2654435761u % MOST_UNITS;
	for (unsigned n = 0; n < 32; n++, i = (i + 1) % MOST_UNITS) {
		if (all[i].start == start && all[i].round == round)
			return &all[i];
		if (!room && all[i].round != round)
			room = &all[i];
	}
	if (room)
		*room = (struct progress){start, start, round};
	return room;
}

/* Slots of a unit to be written: up to 64 at a time. */
struct found {
	const struct unit *unit;
	void **slot[64];
	void *before[64], *value[64];
	unsigned count, stored;
};

static int store_found(struct dl_phdr_info *i, size_t size, void *data)
{
	struct found *f = data;
	(void)size;
	if (i->dlpi_addr != f->unit->base)
		return 0;
	for (int k = 0; k < i->dlpi_phnum; k++) {
		const ElfW(Phdr) *p = &i->dlpi_phdr[k];
		uintptr_t at = i->dlpi_addr + p->p_vaddr;
		if (p->p_type != PT_LOAD || !(p->p_flags & PF_W) || at > f->unit->start ||
		    at + p->p_memsz < f->unit->end)
			continue;
		for (unsigned n = 0; n < f->count; n++)
			f->stored += store_pointer(f->slot[n], f->before[n], f->value[n],
						   f->unit->relro);
	}
	return 1;
}

// Writes what was found. The module may have been unloaded since it was read, so it is looked up again, and written
// under the loader's lock.
static void store_all(struct change *c, struct found *f)
{
	if (!f->count)
		return;
	f->stored = 0;
	modules_walk(store_found, f);
	c->leading_to_us += c->in ? f->stored : 0;
	f->count = 0;
}

static void check_pointer(void **slot, void *value, struct change *c, struct found *f)
{
	for (unsigned k = 0; k < c->hooks->count; k++) {
		const struct hook *h = &c->hooks->table[k];
		if (*h->real && value == (c->in ? *h->real : h->ours)) {
			f->slot[f->count] = slot;
			f->before[f->count] = value;
			f->value[f->count++] = c->in ? h->ours : *h->real;
			if (f->count == sizeof f->slot / sizeof *f->slot)
				store_all(c, f);
			return;
		}
		c->leading_to_us += c->in && value == h->ours;
	}
}

// Read by process_vm_readv, which answers with an error, no signal, where the program has unmapped or protected the
// memory. Returns how far it came: less than the end, when the budget of the scan is spent.
static uintptr_t read_slots(uintptr_t at, uintptr_t end, struct change *c, struct found *f)
{
	static uintptr_t copy[8192];
	while (at < end && !is_spent()) {
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
				check_pointer((void **)(at + 8 * (uintptr_t)n), (void *)copy[n], c,
					      f);
		store_all(c, f);
		budget.bytes -= (uint64_t)got < budget.bytes ? (uint64_t)got : budget.bytes;
		at += (uintptr_t)got & ~7ul;
		if (got < 8)
			at = (at & ~4095ul) + 4096;
	}
	return at < end ? at : end;
}

/* Bits of an entry of /proc/self/pagemap. */
#define PRESENT (1ull << 63)
#define SWAPPED (1ull << 62)

// Which pages the program has written or read. One that it never touched holds no pointer, and reading it would make
// the kernel allocate page tables; a swapped one is left alone too, but when hooks are taken out (`in` false).
static void find_touched(uintptr_t page, unsigned pages, bool in, bool *touched)
{
	static uint64_t entries[PAGEMAP_PAGES];
	static unsigned char resident[PAGEMAP_PAGES];
	long want = (long)(pages * sizeof *entries);
	if (budget.pagemap >= 0 && syscall(SYS_pread64, budget.pagemap, entries, want,
					   page / 4096 * sizeof *entries) == want) {
		for (unsigned k = 0; k < pages; k++)
			touched[k] = entries[k] & (in ? PRESENT : PRESENT | SWAPPED);
		return;
	}
	bool known = !syscall(SYS_mincore, page, (size_t)pages * 4096, resident);
	for (unsigned k = 0; k < pages; k++)
		touched[k] = !known || (resident[k] & 1);
}

static void read_unit(const struct unit *u, struct change *c)
{
	static bool touched[PAGEMAP_PAGES];
	struct found f = {.unit = u};
	struct progress *p = progress_of(c, u->start);
	uintptr_t at = p ? p->at : u->start;
	while (at < u->end && !is_spent()) {
		uintptr_t page = at & ~4095ul, pages = (u->end - page + 4095) / 4096;
		if (pages > PAGEMAP_PAGES)
			pages = PAGEMAP_PAGES;
		find_touched(page, (unsigned)pages, c->in, touched);
		for (unsigned k = 0, next; k < pages && !budget.cut; k = next) {
			for (next = k + 1; next < pages && touched[next] == touched[k];)
				next++;
			uintptr_t to = page + 4096ul * next;
			to = to < u->end ? to : u->end;
			at = touched[k] ? read_slots(at, to, c, &f) : to;
		}
	}
	if (p)
		p->at = at;
}

static void add_unit(struct change *c, struct unit u)
{
	struct progress *p = progress_of(c, u.start);
	if (u.start >= u.end || (p && p->at >= u.end))
		return;
	if (unit_count < MOST_UNITS)
		units[unit_count++] = u;
	else
		budget.cut = true; // a later scan gets to it, once units before it need no reading
}

static void add_segment(const struct dl_phdr_info *i, const ElfW(Phdr) * p, struct change *c,
			struct protection relro)
{
	struct unit u = {
		.start = (i->dlpi_addr + p->p_vaddr + 7) & ~7ul,
		.end = (i->dlpi_addr + p->p_vaddr + p->p_memsz) & ~7ul,
		.base = i->dlpi_addr,
		.relro = relro,
	};
	uintptr_t end = u.end, head = (u.start & ~4095ul) + HEAD_BYTES;
	u.end = end < head ? end : head;
	add_unit(c, u);
	u.start = head;
	u.end = end;
	u.tail = true;
	add_unit(c, u);
}

// Hooks imports that are not bound yet: their first call would bind them to the real function.
static void bind_imports(struct dl_phdr_info *i, const struct dynamic *d, struct change *c,
			 struct protection relro, uintptr_t low, uintptr_t high)
{
	for (size_t k = 0; k < d->plt_count; k++) {
		const ElfW(Rela) *r = &d->plt[k];
		if (!module_holds(i, r, sizeof *r, PF_R))
			return;
		void **slot = (void **)(i->dlpi_addr + r->r_offset);
		if (ELF64_R_TYPE(r->r_info) != R_X86_64_JUMP_SLOT || (uintptr_t)slot % 8 ||
		    !module_holds(i, slot, sizeof *slot, PF_R | PF_W))
			continue;
		uintptr_t value = (uintptr_t)__atomic_load_n(slot, __ATOMIC_RELAXED);
		if (value < low || value >= high) // not into its own module: bound already
			continue;
		const char *name = symbol_name(i, d, ELF64_R_SYM(r->r_info));
		for (unsigned n = 0; name && n < c->hooks->count; n++) {
			const struct hook *h = &c->hooks->table[n];
			if (*h->real && !strcmp(h->name, name)) {
				store_pointer(slot, (void *)value, h->ours,
					      relro); // counted when it is read
			}
		}
	}
}

static int collect_module(struct dl_phdr_info *i, size_t size, void *data)
{
	struct change *c = data;
	struct protection relro = {0, 0};
	struct dynamic d;
	uintptr_t low = UINTPTR_MAX, high = 0;
	(void)size;
	unsigned before = unit_count;
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
	if ((uintptr_t)collect_module >= low && (uintptr_t)collect_module < high)
		return 0; // our own slots must stay what they are
	for (int k = 0; k < i->dlpi_phnum; k++) {
		const ElfW(Phdr) *p = &i->dlpi_phdr[k];
		if (p->p_type == PT_LOAD && (p->p_flags & (PF_R | PF_W)) == (PF_R | PF_W))
			add_segment(i, p, c, relro);
	}
	if (c->in && unit_count > before && read_dynamic(i, &d) && d.plt)
		bind_imports(i, &d, c, relro, low, high);
	return 0;
}

// Modules that are never hooked.
static const char *const never[] = {"linux-vdso", "ld-linux", "libc.so", NULL};

static void widen(struct range *r, void *slot)
{
	if ((uintptr_t)slot < r->low)
		r->low = (uintptr_t)slot;
	if ((uintptr_t)slot > r->high)
		r->high = (uintptr_t)slot;
}

// One range for each library: a single range over all would also hold what lies between them.
static void widen_near(struct change *c, void *slot)
{
	uintptr_t at = (uintptr_t)slot;
	unsigned k = 0;
	while (k < c->ranges && (at + NEAR < c->theirs[k].low || at > c->theirs[k].high + NEAR))
		k++;
	if (k == MOST_RANGES)
		k--;
	else if (k == c->ranges)
		c->theirs[c->ranges++] = (struct range){at, at};
	widen(&c->theirs[k], slot);
}

unsigned hooks_apply(const struct hooks *hooks, bool in, bool only_new)
{
	struct hooks all = *hooks;
	if (!all.skip)
		all.skip = never;
	struct change c = {
		.hooks = &all,
		.in = in,
		.ours = {UINTPTR_MAX, 0},
	};
	for (unsigned k = 0; k < hooks->count; k++) {
		const struct hook *h = &hooks->table[k];
		if (!*h->real)
			continue;
		widen_near(&c, in ? *h->real : h->ours);
		widen(&c.ours, h->ours);
	}
	if (!c.ranges)
		return 0;
	if (!only_new)
		rounds[hooks->number]++;
	unit_count = 0;
	modules_walk(collect_module, &c);
	// Heads first: a huge array must not use up the budget of all.
	for (int tail = 0; tail < 2; tail++)
		for (unsigned k = 0; k < unit_count; k++)
			if (units[k].tail == tail)
				read_unit(&units[k], &c);
	return c.leading_to_us;
}
