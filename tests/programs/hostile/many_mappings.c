// SPDX-License-Identifier: Apache-2.0
// As many mappings as the kernel allows, every one of a file whose path is as long as it can be.
//
//     many_mappings FOLDER COUNT [storm]
//
// Every second one is executable, so that no two merge. "storm": then one page is mapped over and
// over, as fast as the kernel does it. Prints "ready" once they stand.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 4000
#define NAME_BYTES 200

static int file_at_the_end_of_a_long_path(const char *folder)
{
	char name[NAME_BYTES + 1], here[8192];
	memset(name, 'd', NAME_BYTES);
	name[NAME_BYTES] = 0;
	if (chdir(folder))
		return -1;
	while (getcwd(here, sizeof here) && strlen(here) + NAME_BYTES + 1 < PATH_BYTES) {
		mkdir(name, 0700);
		if (chdir(name))
			return -1;
	}
	return open("mapped", O_RDWR | O_CREAT | O_CLOEXEC, 0700);
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	long page = sysconf(_SC_PAGESIZE), count = atol(argv[2]);
	int fd = file_at_the_end_of_a_long_path(argv[1]);
	if (fd < 0 || ftruncate(fd, (count + 1) * page)) {
		perror("file");
		return 1;
	}
	char *at = mmap(NULL, count * page, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
	if (at == MAP_FAILED) {
		perror("mmap");
		return 1;
	}
	for (long i = 1; i < count; i += 2)
		if (mprotect(at + i * page, page, PROT_READ))
			break; // as many as the kernel allows
	puts("ready");
	fflush(stdout);
	if (argc > 3)
		for (;;) {
			void *one = mmap(NULL, page, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
			if (one != MAP_FAILED)
				munmap(one, page);
		}
	pause();
	return 0;
}
