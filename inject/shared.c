// SPDX-License-Identifier: Apache-2.0
// The sealed memory that the agent reads: header, state, ring, names.
#include "internal.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MFD_CLOEXEC
#define MFD_CLOEXEC 1u
#define MFD_ALLOW_SEALING 2u
#endif
#define ADD_SEALS 1033
#define SEALS (1 | 2 | 4) /* SEAL, SHRINK, GROW */
#define HIGH_FD 600	  /* out of the way of programs that expect the next low number */
#define NAME_SLOTS 16384u /* a power of two */

struct shared shared;
static struct shared_names {
	_Atomic uint32_t lock;
	_Atomic uint32_t slot[NAME_SLOTS]; /* offset of a name, 0 free; set once */
	uint32_t used;
} * names;

// Making a file longer than RLIMIT_FSIZE would end the host by SIGXFSZ.
static bool may_be_so_long(size_t bytes)
{
	struct rlimit most;
	return getrlimit(RLIMIT_FSIZE, &most) || most.rlim_cur >= bytes;
}

char *shared_memory(const char *name, size_t bytes, int *descriptor)
{
	if (!may_be_so_long(bytes))
		return NULL;
	int fd = (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return NULL;
	int high = (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, HIGH_FD);
	if (high >= 0) {
		syscall(SYS_close, fd);
		fd = high;
	}
	if (syscall(SYS_ftruncate, fd, (long)bytes) || syscall(SYS_fcntl, fd, ADD_SEALS, SEALS)) {
		syscall(SYS_close, fd);
		return NULL;
	}
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED) {
		syscall(SYS_close, fd);
		return NULL;
	}
	*descriptor = fd;
	return at;
}

bool shared_create(uint32_t generation)
{
	int stays_open; /* an agent opens it by /proc/PID/fd */
	char *at = shared_memory(INJECT_MEMFD, INJECT_BYTES, &stays_open);
	if (!at)
		return false;
	if (!names) {
		names = mmap(NULL, sizeof *names, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (names == MAP_FAILED) {
			names = NULL;
			munmap(at, INJECT_BYTES);
			return false;
		}
	}
	memset(names, 0, sizeof *names);
	shared = (struct shared){
		.header = (void *)(at + INJECT_HEADER_AT),
		.control = (void *)(at + INJECT_CONTROL_AT),
		.state = (void *)(at + INJECT_STATE_AT),
		.ring = (void *)(at + INJECT_RING_AT),
		.names = at + INJECT_NAMES_AT,
		.functions = (void *)(at + INJECT_FUNCTIONS_AT),
		.slots = (void *)(at + INJECT_SLOTS_AT),
	};
	shared.state->names_end = 8; /* 0 is no name */
	struct inject_header *h = shared.header;
	h->abi = INJECT_ABI;
	h->bytes = INJECT_BYTES;
	h->pid = (uint32_t)getpid();
	h->generation = generation;
	h->born_ns = now_ns();
	__atomic_store_n(&h->magic, INJECT_MAGIC, __ATOMIC_RELEASE);
	return true;
}

void shared_forget(void)
{
	if (shared.header)
		munmap((char *)shared.header - INJECT_HEADER_AT, INJECT_BYTES);
	memset(&shared, 0, sizeof shared);
}

bool shared_put(struct inject_record *record)
{
	uint64_t head = shared.state->head;
	uint64_t tail = __atomic_load_n(&shared.control->tail, __ATOMIC_ACQUIRE);
	if (head - tail >= INJECT_RING_RECORDS) { // a tail ahead of the head is nonsense: no room
		COUNT(lost_ring, 1);
		return false;
	}
	record->seq = head + 1;
	shared.ring[head % INJECT_RING_RECORDS] = *record;
	__atomic_store_n(&shared.state->head, head + 1, __ATOMIC_RELEASE);
	return true;
}

static uint32_t hash_of(const char *text, uint32_t length)
{
	uint32_t h = 2166136261u;
	for (uint32_t i = 0; i < length; i++)
		h = (h ^ (uint8_t)text[i]) * 16777619u;
	return h;
}

// The offset of a name that is there, else 0 and the free slot for it (NAME_SLOTS: the 64 that it may be in are
// taken). Needs no lock: names are only ever added.
static uint32_t find(const char *text, uint32_t length, uint32_t hash, uint32_t *slot)
{
	*slot = NAME_SLOTS;
	for (uint32_t i = hash % NAME_SLOTS, n = 0; n < 64; n++, i = (i + 1) % NAME_SLOTS) {
		uint32_t at = atomic_load_explicit(&names->slot[i], memory_order_acquire);
		if (!at) {
			*slot = i;
			return 0;
		}
		struct inject_name *name = (void *)(shared.names + at);
		if (name->hash == hash && name->length == length &&
		    !memcmp(name->text, text, length))
			return at;
	}
	return 0;
}

static uint32_t find_or_add(const char *text, uint32_t length, uint32_t hash)
{
	uint32_t slot, at = find(text, length, hash, &slot);
	if (at || slot == NAME_SLOTS)
		return at;
	uint64_t end = shared.state->names_end;
	uint64_t need = (sizeof(struct inject_name) + length + 7) & ~7ull;
	if (end + need > INJECT_NAMES_BYTES)
		return 0;
	struct inject_name *name = (void *)(shared.names + end);
	name->length = length;
	name->hash = hash;
	memcpy(name->text, text, length);
	__atomic_store_n(&shared.state->names_end, end + need, __ATOMIC_RELEASE);
	atomic_store_explicit(&names->slot[slot], (uint32_t)end, memory_order_release);
	return (uint32_t)end;
}

uint32_t shared_name(const char *text)
{
	if (!text || !*text)
		return 0;
	uint32_t length = (uint32_t)strnlen(text, INJECT_NAME_MAX);
	uint32_t hash = hash_of(text, length), slot, known = find(text, length, hash, &slot);
	if (known)
		return known;
	for (int spins = 0; atomic_exchange_explicit(&names->lock, 1, memory_order_acquire);) {
		if (++spins > 20000) { // its holder has no CPU: no name, rather than a wait
			COUNT(lost_names, 1);
			return 0;
		}
	}
	uint32_t at = find_or_add(text, length, hash);
	atomic_store_explicit(&names->lock, 0, memory_order_release);
	if (!at)
		COUNT(lost_names, 1);
	return at;
}
