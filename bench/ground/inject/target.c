// SPDX-License-Identifier: Apache-2.0
// The target's mappings and C library: where dlopen, the fork guard and the rt_sigreturn stub are.
#include "inject.h"

#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct range loader_text, loader_all;
uint64_t dlopen_at, restore_at, return_at, lock_at, unlock_at, getppid_at, errno_offset;
bool have_errno;
static struct range libc_text;
static uint64_t libc_base;

bool remote_read(uint64_t at, void *to, size_t n)
{
	struct iovec l = {to, n}, r = {(void *)at, n};
	return process_vm_readv(pid, &l, 1, &r, 1, 0) == (ssize_t)n;
}

bool remote_write(uint64_t at, const void *from, size_t n)
{
	struct iovec l = {(void *)from, n}, r = {(void *)at, n};
	return process_vm_writev(pid, &l, 1, &r, 1, 0) == (ssize_t)n;
}

static uint64_t find_symbol(const uint8_t *file, const char *name)
{
	const Elf64_Ehdr *e = (const void *)file;
	const Elf64_Shdr *s = (const void *)(file + e->e_shoff);
	for (int i = 0; i < e->e_shnum; i++) {
		if (s[i].sh_type != SHT_DYNSYM)
			continue;
		const Elf64_Sym *sym = (const void *)(file + s[i].sh_offset);
		const char *str = (const char *)file + s[s[i].sh_link].sh_offset;
		for (size_t k = 0; k < s[i].sh_size / sizeof *sym; k++)
			if (sym[k].st_value && !strcmp(str + sym[k].st_name, name))
				return sym[k].st_value;
	}
	return 0;
}

void find_libc(void)
{
	char path[4300], line[4300], libc_path[4096] = "", libdl_path[4096] = "";
	uint64_t libdl_base = 0;
	snprintf(path, sizeof path, "/proc/%d/maps", pid);
	FILE *f = fopen(path, "r");
	if (!f)
		finish(3, "\"why\":\"no such process, or not allowed to read it\"");
	while (fgets(line, sizeof line, f)) {
		uint64_t low, high, offset;
		char perms[8], name[4096] = "";
		if (sscanf(line, "%lx-%lx %7s %lx %*s %*s %4095[^\n]", &low, &high, perms, &offset,
			   name) < 4)
			continue;
		const char *leaf = strrchr(name, '/');
		leaf = leaf ? leaf + 1 : name;
		if (!strncmp(leaf, "ld-musl", 7))
			finish(3, "\"why\":\"the C library is musl, which is not proved\"");
		bool c = !strcmp(leaf, "libc.so.6") || !strncmp(leaf, "libc-2.", 7);
		bool d = !strcmp(leaf, "libdl.so.2") || !strncmp(leaf, "libdl-2.", 8);
		bool l = !strncmp(leaf, "ld-linux-x86-64", 15) || !strncmp(leaf, "ld-2.", 5);
		if (c && !libc_base) {
			libc_base = low - offset;
			snprintf(libc_path, sizeof libc_path, "%s", name);
		}
		if (d && !libdl_base) {
			libdl_base = low - offset;
			snprintf(libdl_path, sizeof libdl_path, "%s", name);
		}
		if (c && perms[2] == 'x')
			libc_text = (struct range){low, high};
		if (l && perms[2] == 'x')
			loader_text = (struct range){low, high};
		if (l)
			loader_all = (struct range){loader_all.low ? loader_all.low : low, high};
	}
	fclose(f);
	if (!libc_base || !libc_text.high || !loader_text.high)
		finish(3,
		       "\"why\":\"no dynamic glibc in the process (static or foreign program)\"");
	for (int which = 0; which < 2 && !dlopen_at; which++) {
		const char *leaf = which ? libdl_path : libc_path;
		if (!*leaf)
			continue;
		snprintf(path, sizeof path, "/proc/%d/root%s", pid, leaf);
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		struct stat st;
		if (fd < 0 || fstat(fd, &st))
			finish(3, "\"why\":\"cannot read the process's C library\"");
		uint8_t *file = mmap(NULL, st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
		close(fd);
		if (file == MAP_FAILED)
			finish(1, "\"why\":\"mmap\"");
		uint64_t value = find_symbol(file, "dlopen");
		if (value)
			dlopen_at = (which ? libdl_base : libc_base) + value;
		if (!which) {
			lock_at = libc_base + find_symbol(file, "_IO_list_lock");
			unlock_at = libc_base + find_symbol(file, "_IO_list_unlock");
			getppid_at = libc_base + find_symbol(file, "getppid");
		}
		uint64_t e = which ? 0 : find_symbol(file, "__errno_location");
		uint8_t code[24];
		// [endbr64] mov x(%rip),%rax; add %fs:0,%rax; ret : the offset of errno from the thread pointer.
		if (e && remote_read(libc_base + e, code, sizeof code)) {
			uint8_t *p = code;
			uint64_t at = libc_base + e;
			if (!memcmp(p, "\xf3\x0f\x1e\xfa", 4))
				p += 4, at += 4;
			if (!memcmp(p, "\x48\x8b\x05", 3) &&
			    !memcmp(p + 7, "\x64\x48\x03\x04\x25", 5)) {
				int32_t disp;
				memcpy(&disp, p + 3, 4);
				have_errno = remote_read(at + 7 + disp, &errno_offset, 8);
			}
		}
		munmap(file, st.st_size);
	}
	if (!dlopen_at)
		finish(3, "\"why\":\"the C library has no dlopen\"");
	size_t n = libc_text.high - libc_text.low;
	uint8_t *text = malloc(n);
	if (!remote_read(libc_text.low, text, n))
		finish(1, "\"why\":\"cannot read libc's code\"");
	static const uint8_t stub[] = {0x48, 0xc7, 0xc0, 0x0f, 0,
				       0,    0,	   0x0f, 0x05}; // mov $15,%rax; syscall
	uint8_t *hit = memmem(text, n, stub, sizeof stub);
	if (!hit)
		finish(3, "\"why\":\"no rt_sigreturn stub in libc\"");
	restore_at = libc_text.low + (hit - text);
	uint8_t *ret = memchr(text, 0xc3, n);
	if (!ret || lock_at == libc_base || unlock_at == libc_base || getppid_at == libc_base)
		finish(3, "\"why\":\"this C library lacks what the fork guard needs\"");
	return_at = libc_text.low + (ret - text);
	free(text);
}

struct range mapping_of(uint64_t at)
{
	char path[64], line[4300];
	struct range found = {0, 0};
	snprintf(path, sizeof path, "/proc/%d/maps", pid);
	FILE *f = fopen(path, "r");
	while (f && fgets(line, sizeof line, f)) {
		uint64_t low, high;
		char perms[8], name[4096] = "";
		if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %4095[^\n]", &low, &high, perms, name) <
		    3)
			continue;
		if (at < low || at >= high)
			continue;
		found = (struct range){low, high};
		if (strstr(name, "[stack]"))
			found.low = low > (4u << 20) ? low - (4u << 20) : 0; // grows by itself
		break;
	}
	if (f)
		fclose(f);
	return found;
}

bool library_mapped(const char *name)
{
	char path[64], line[4300];
	snprintf(path, sizeof path, "/proc/%d/maps", pid);
	FILE *f = fopen(path, "r");
	bool found = false;
	while (f && !found && fgets(line, sizeof line, f))
		found = strstr(line, name) && strstr(line, "r-xp");
	if (f)
		fclose(f);
	return found;
}
