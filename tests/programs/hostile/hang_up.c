// SPDX-License-Identifier: Apache-2.0
// A terminal under the name of the memory that the library makes, in namespaces of one's own: a
// daemon that opens it without O_NOCTTY has it as its terminal, and gets SIGHUP when it hangs up.
//
//     hang_up FOLDER
//
// Prints "ready"; then "taken" and hangs up as soon as some session has it, and waits.
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

#define NAME "memfd:sonde-inject (deleted)"
#define LIBRARY "sonde-inject-0.so"

static void must(int rc, const char *what)
{
	if (rc < 0) {
		perror(what);
		exit(1);
	}
}

static void put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0700);
	must(fd, path);
	must((int)write(fd, text, strlen(text)), path);
	close(fd);
}

int main(int argc, char **argv)
{
	if (argc < 2)
		return 2;
	int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
	must(master, "posix_openpt");
	must(grantpt(master), "grantpt");
	must(unlockpt(master), "unlockpt");
	char *slave = ptsname(master), user[64], group[64];
	snprintf(user, sizeof user, "0 %d 1", (int)getuid());
	snprintf(group, sizeof group, "0 %d 1", (int)getgid());
	must(unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare");
	put("/proc/self/uid_map", user);
	put("/proc/self/setgroups", "deny");
	put("/proc/self/gid_map", group);
	must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private");
	must(mount("tmpfs", argv[1], "tmpfs", 0, NULL), "tmpfs");
	must(chdir(argv[1]), "chdir");
	put(NAME, "");
	put(LIBRARY, "library");
	must(mount(slave, NAME, NULL, MS_BIND, NULL), "bind");
	must((int)syscall(SYS_pivot_root, ".", "."), "pivot_root");
	must(umount2(".", MNT_DETACH), "umount");
	int fd = open("/" NAME, O_RDWR | O_NOCTTY | O_CLOEXEC);
	must(fd, NAME);
	must(fcntl(fd, F_DUPFD, 600), "dup");
	int library = open("/" LIBRARY, O_RDONLY | O_CLOEXEC);
	if (mmap(NULL, 7, PROT_READ | PROT_EXEC, MAP_PRIVATE, library, 0) == MAP_FAILED)
		return 1;
	puts("ready");
	fflush(stdout);
	while (tcgetsid(master) <= 0)
		usleep(10000);
	puts("taken");
	fflush(stdout);
	close(master);
	pause();
	return 0;
}
