/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into a process that writes a store: keeps what a power loss would leave, and refuses
 * calls as a full or broken disk would. Only what lies below $DISK_FAULTS_DIR counts.
 *
 * Each fsync or fdatasync that succeeds leaves in $DISK_FAULTS_KEPT, by its number N:
 *   N.synced   "INODE BIRTH f|d": what was synced, a file or a directory
 *   N.data     the content of the file at that time
 *   N.tree     a line "INODE BIRTH f|d PATH" for each name there was
 * The disk itself is not waited for: nothing here survives a real power loss.
 *
 * disk_faults_refuse(first, count, error) lets `count` calls fail that change the disk, from the
 * first-th on (counted from 1, from that call on).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static long syncs, calls, first_refused, refused_count;
static int refused_error;
static FILE *tree;

long disk_faults_syncs(void)
{
	return syncs;
}

/* Calls that change the disk, since the last disk_faults_refuse. */
long disk_faults_calls(void)
{
	return calls;
}

void disk_faults_refuse(long first, long count, int error)
{
	pthread_mutex_lock(&mutex);
	calls = 0;
	first_refused = first;
	refused_count = count;
	refused_error = error;
	pthread_mutex_unlock(&mutex);
}

static int is_watched(const char *path)
{
	const char *dir = getenv("DISK_FAULTS_DIR");

	return dir && path && strncmp(path, dir, strlen(dir)) == 0;
}

static int is_watched_fd(int fd)
{
	char link[64], path[PATH_MAX];
	ssize_t size;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	size = readlink(link, path, sizeof(path) - 1);
	if (size < 0)
		return 0;
	path[size] = 0;
	return is_watched(path);
}

/* Whether this call is to fail; errno is set then. */
static int is_refused(void)
{
	int refuses;

	pthread_mutex_lock(&mutex);
	calls++;
	refuses = first_refused && calls >= first_refused && calls < first_refused + refused_count;
	pthread_mutex_unlock(&mutex);
	if (refuses)
		errno = refused_error;
	return refuses;
}

static long long birth_of(int fd, const char *path)
{
	struct statx found;

	if (statx(fd, path, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, STATX_BTIME, &found))
		return 0;
	return found.stx_btime.tv_sec * 1000000000LL + found.stx_btime.tv_nsec;
}

static FILE *kept(const char *suffix)
{
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%s/%ld.%s", getenv("DISK_FAULTS_KEPT"), syncs, suffix);
	return fopen(path, "w");
}

static int list(const char *path, const struct stat *st, int kind, struct FTW *where)
{
	(void)kind;
	(void)where;
	fprintf(tree, "%lu %lld %c %s\n", (unsigned long)st->st_ino, birth_of(AT_FDCWD, path),
		S_ISDIR(st->st_mode) ? 'd' : 'f', path);
	return 0;
}

static int keep(int fd)
{
	char link[64], buffer[1 << 16];
	struct stat st;
	ssize_t size;
	FILE *file;
	int content;

	if (fstat(fd, &st))
		return -1;
	pthread_mutex_lock(&mutex);
	file = kept("synced");
	fprintf(file, "%lu %lld %c\n", (unsigned long)st.st_ino, birth_of(fd, ""),
		S_ISDIR(st.st_mode) ? 'd' : 'f');
	fclose(file);
	if (!S_ISDIR(st.st_mode)) {
		snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
		content = REAL(open)(link, O_RDONLY | O_CLOEXEC);
		file = kept("data");
		while ((size = read(content, buffer, sizeof(buffer))) > 0)
			fwrite(buffer, 1, size, file);
		fclose(file);
		close(content);
	}
	tree = kept("tree");
	nftw(getenv("DISK_FAULTS_DIR"), list, 16, FTW_PHYS);
	fclose(tree);
	syncs++;
	pthread_mutex_unlock(&mutex);
	return 0;
}

int fsync(int fd)
{
	if (!is_watched_fd(fd))
		return REAL(fsync)(fd);
	return is_refused() ? -1 : keep(fd);
}

int fdatasync(int fd)
{
	if (!is_watched_fd(fd))
		return REAL(fdatasync)(fd);
	return is_refused() ? -1 : keep(fd);
}

#define REFUSABLE(type, name, watched, parameters, arguments)                                      \
	type name parameters                                                                       \
	{                                                                                          \
		if ((watched) && is_refused())                                                     \
			return -1;                                                                 \
		return REAL(name) arguments;                                                       \
	}

REFUSABLE(ssize_t, write, is_watched_fd(fd), (int fd, const void *data, size_t size),
	  (fd, data, size))
REFUSABLE(ssize_t, writev, is_watched_fd(fd), (int fd, const struct iovec *parts, int count),
	  (fd, parts, count))
REFUSABLE(ssize_t, pwrite, is_watched_fd(fd), (int fd, const void *data, size_t size, off_t at),
	  (fd, data, size, at))
REFUSABLE(ssize_t, pwrite64, is_watched_fd(fd), (int fd, const void *data, size_t size, off64_t at),
	  (fd, data, size, at))
REFUSABLE(int, ftruncate, is_watched_fd(fd), (int fd, off_t size), (fd, size))
REFUSABLE(int, ftruncate64, is_watched_fd(fd), (int fd, off64_t size), (fd, size))
REFUSABLE(int, mkdir, is_watched(path), (const char *path, mode_t mode), (path, mode))
REFUSABLE(int, rename, is_watched(from), (const char *from, const char *to), (from, to))
REFUSABLE(int, link, is_watched(from), (const char *from, const char *to), (from, to))

#define OPENS(name)                                                                                \
	int name(const char *path, int flags, ...)                                                 \
	{                                                                                          \
		mode_t mode = 0;                                                                   \
		va_list more;                                                                      \
                                                                                                   \
		if (flags & O_CREAT) {                                                             \
			va_start(more, flags);                                                     \
			mode = va_arg(more, mode_t);                                               \
			va_end(more);                                                              \
		}                                                                                  \
		if ((flags & O_CREAT) && is_watched(path) && access(path, F_OK) && is_refused())   \
			return -1;                                                                 \
		return REAL(name)(path, flags, mode);                                              \
	}

OPENS(open)
OPENS(open64)
