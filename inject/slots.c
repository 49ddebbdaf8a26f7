// SPDX-License-Identifier: Apache-2.0
// Pointer slots that lead to device functions, as the agent found them from outside. Before ours goes into
// one it is checked again: that it lies in writable data of a module that is loaded, and that it holds the
// function, or an import of its name that is not bound yet.
#include "modules.h"

#include <elf.h>
#include <string.h>

#define AT_ONCE 128u	  /* slots that are written while the loader's lock is held once */
#define MOST_PLACED 8192u /* slots of further lists are refused, and counted */

/* A slot that leads to us. */
static struct placed {
	uintptr_t slot, base;
	const struct hook *hook;
	bool kept; /* slots_recheck: its module is still there */
} placed[MOST_PLACED];
static unsigned placed_count;

static struct inject_function functions[INJECT_FUNCTIONS]; /* as they were published last */

struct module {
	uintptr_t base, low, high, relro_start, relro_end;
};

static struct module describe(const struct dl_phdr_info *i)
{
	struct module m = {.base = i->dlpi_addr, .low = UINTPTR_MAX};
	for (int k = 0; k < i->dlpi_phnum; k++) {
		const ElfW(Phdr) *p = &i->dlpi_phdr[k];
		uintptr_t at = i->dlpi_addr + p->p_vaddr;
		if (p->p_type == PT_GNU_RELRO) {
			m.relro_start = at & ~4095ul;
			m.relro_end = at + p->p_memsz;
		}
		if (p->p_type != PT_LOAD)
			continue;
		m.low = at < m.low ? at : m.low;
		m.high = at + p->p_memsz > m.high ? at + p->p_memsz : m.high;
	}
	return m;
}

static bool is_ours(const struct module *m)
{
	return (uintptr_t)describe >= m->low && (uintptr_t)describe < m->high;
}

static bool is_skipped(const struct hooks *hooks, const struct dl_phdr_info *i)
{
	static const char *const never[] = {"linux-vdso", "ld-linux", "libc.so", NULL};
	const char *name = base_name(i->dlpi_name ? i->dlpi_name : "");
	for (const char *const *s = hooks->skip ? hooks->skip : never; *s; s++)
		if (strstr(name, *s))
			return true;
	return false;
}

void slots_publish(const struct hooks *const lists[MOST_LISTS])
{
	static struct inject_function now[INJECT_FUNCTIONS];
	uint32_t count = 0;
	for (unsigned l = 0; l < MOST_LISTS; l++)
		for (unsigned k = 0; lists[l] && k < lists[l]->count; k++) {
			const struct hook *h = &lists[l]->table[k];
			if (*h->real && count < INJECT_FUNCTIONS)
				now[count++] = (struct inject_function){
					.address = (uintptr_t)*h->real,
					.name = shared_name(h->name),
				};
		}
	struct inject_state *state = shared.state;
	if (state->functions_seq && count == state->functions_count &&
	    !memcmp(now, functions, count * sizeof *now))
		return;
	memcpy(functions, now, count * sizeof *now);
	memcpy(shared.functions, now, count * sizeof *now);
	SET(functions_count, count);
	__atomic_store_n(&state->functions_seq, state->functions_seq + 1, __ATOMIC_RELEASE);
}

/* A part of the agent's list that is being taken over. */
struct taking {
	const struct hooks *const *lists;
	struct inject_slot slot[AT_ONCE];
	unsigned count, stored;
};

static const struct hook *hook_of(const struct hooks *hooks, uintptr_t real)
{
	for (unsigned k = 0; hooks && k < hooks->count; k++)
		if (*hooks->table[k].real && (uintptr_t)*hooks->table[k].real == real)
			return &hooks->table[k];
	return NULL;
}

static const struct hook *hook_named(const struct hooks *hooks, const char *name)
{
	for (unsigned k = 0; hooks && k < hooks->count; k++)
		if (*hooks->table[k].real && !strcmp(hooks->table[k].name, name))
			return &hooks->table[k];
	return NULL;
}

// The name of an import that is not bound yet, which leads into its own module: its first call would bind it to the
// real function. NULL: it is none.
static const char *unbound_name(const struct dl_phdr_info *i, const struct dynamic *d,
				const struct module *m, const struct inject_slot *s)
{
	size_t index = s->relocation - 1;
	const ElfW(Rela) *r = d->plt ? &d->plt[index] : NULL;
	if (!r || index >= d->plt_count || !module_holds(i, r, sizeof *r, PF_R) ||
	    ELF64_R_TYPE(r->r_info) != R_X86_64_JUMP_SLOT || m->base + r->r_offset != s->address ||
	    s->value < m->low || s->value >= m->high)
		return NULL;
	return symbol_name(i, d, ELF64_R_SYM(r->r_info));
}

static void remember(uintptr_t slot, uintptr_t base, const struct hook *hook)
{
	for (unsigned k = 0; k < placed_count; k++)
		if (placed[k].slot == slot) {
			placed[k] = (struct placed){slot, base, hook, true};
			return;
		}
	placed[placed_count++] = (struct placed){slot, base, hook, true};
}

static void place(struct dl_phdr_info *i, const struct module *m, const struct dynamic *d,
		  struct taking *t, const struct inject_slot *s)
{
	const char *name = s->relocation ? unbound_name(i, d, m, s) : NULL;
	if (s->relocation && !name)
		return;
	for (unsigned l = 0; l < MOST_LISTS && placed_count < MOST_PLACED; l++) {
		const struct hooks *hooks = t->lists[l];
		const struct hook *h = name ? hook_named(hooks, name) : hook_of(hooks, s->value);
		if (!h || is_skipped(hooks, i))
			continue;
		if (pointer_store((void **)s->address, (void *)(uintptr_t)s->value, h->ours,
				  m->relro_start, m->relro_end)) {
			remember(s->address, m->base, h);
			t->stored++;
		}
		return;
	}
}

static unsigned first_from(const struct taking *t, uintptr_t address)
{
	unsigned low = 0, high = t->count;
	while (low < high) {
		unsigned middle = (low + high) / 2;
		if (t->slot[middle].address < address)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static int place_in_module(struct dl_phdr_info *i, size_t size, void *data)
{
	struct taking *t = data;
	struct module m = describe(i);
	struct dynamic d = {0};
	(void)size;
	unsigned first = first_from(t, m.low);
	if (first == t->count || t->slot[first].address >= m.high || is_ours(&m))
		return 0;
	if (!read_dynamic(i, &d))
		d.plt = NULL;
	for (unsigned k = first; k < t->count && t->slot[k].address < m.high; k++) {
		void *slot = (void *)(uintptr_t)t->slot[k].address;
		if (module_holds(i, slot, sizeof(void *), PF_R | PF_W))
			place(i, &m, &d, t, &t->slot[k]);
	}
	return 0;
}

// The list lies in shared memory, which may change meanwhile: so it is copied before it is checked. An address that is
// not above the one before ends the list. Returns where the next part begins.
static unsigned copy_some(struct taking *t, uint32_t from, uint32_t count, uint64_t *last)
{
	t->count = 0;
	unsigned k = from;
	for (; k < count && t->count < AT_ONCE; k++) {
		struct inject_slot s = shared.slots[k];
		if (s.address <= *last || s.address % sizeof(void *))
			return count;
		*last = s.address;
		t->slot[t->count++] = s;
	}
	return k;
}

void slots_take(const struct hooks *const lists[MOST_LISTS])
{
	static struct taking t;
	const struct inject_control *c = shared.control;
	uint32_t seq = __atomic_load_n(&c->slots_seq, __ATOMIC_ACQUIRE);
	if (seq == shared.state->slots_done)
		return;
	uint32_t count = __atomic_load_n(&c->slots_count, __ATOMIC_RELAXED);
	if (count > INJECT_SLOTS_MOST)
		count = INJECT_SLOTS_MOST;
	uint64_t last = 0;
	unsigned stored = 0;
	for (uint32_t from = 0; from < count;) {
		t.lists = lists;
		t.stored = 0;
		from = copy_some(&t, from, count, &last);
		if (t.count)
			modules_walk(place_in_module, &t);
		stored += t.stored;
	}
	COUNT(slots_refused, count - stored);
	__atomic_store_n(&shared.state->slots_done, seq, __ATOMIC_RELEASE);
}

static int keep_in_module(struct dl_phdr_info *i, size_t size, void *data)
{
	(void)size;
	(void)data;
	for (unsigned k = 0; k < placed_count; k++)
		if (placed[k].base == i->dlpi_addr &&
		    module_holds(i, (void *)placed[k].slot, sizeof(void *), PF_R | PF_W))
			placed[k].kept = true;
	return 0;
}

static void drop_gone(void)
{
	unsigned count = 0;
	for (unsigned k = 0; k < placed_count; k++)
		if (placed[k].kept)
			placed[count++] = placed[k];
	placed_count = count;
}

void slots_recheck(void)
{
	if (!placed_count)
		return;
	for (unsigned k = 0; k < placed_count; k++)
		placed[k].kept = false;
	modules_walk(keep_in_module, NULL);
	drop_gone();
}

unsigned slots_placed(void)
{
	return placed_count;
}

static int put_back_in_module(struct dl_phdr_info *i, size_t size, void *data)
{
	(void)size;
	(void)data;
	struct module m = describe(i);
	for (unsigned k = 0; k < placed_count; k++)
		if (placed[k].base == m.base &&
		    module_holds(i, (void *)placed[k].slot, sizeof(void *), PF_R | PF_W))
			pointer_store((void **)placed[k].slot, placed[k].hook->ours,
				      *placed[k].hook->real, m.relro_start, m.relro_end);
	return 0;
}

void slots_put_back(void)
{
	if (placed_count)
		modules_walk(put_back_in_module, NULL);
	placed_count = 0;
}
