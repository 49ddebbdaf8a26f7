// SPDX-License-Identifier: Apache-2.0
// Stands in for a collective library: sums over ranks in a ring of sockets, blocking, as gloo does.
// Built as libgloo-standin.so, so that the name is one that is recognised.

#include <errno.h>
#include <string.h>
#include <unistd.h>

static int all_of(int fd, char *at, size_t left, int sends)
{
	while (left) {
		ssize_t done = sends ? write(fd, at, left) : read(fd, at, left);
		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return -1;
		at += done;
		left -= (size_t)done;
	}
	return 0;
}

int all_reduce(int next, int previous, double *values, int count, int ranks)
{
	double passed[1024], got[1024];
	if (count > 1024)
		return -1;
	size_t size = (size_t)count * sizeof *values;
	memcpy(passed, values, size);
	for (int turn = 1; turn < ranks; turn++) {
		if (all_of(next, (char *)passed, size, 1) || all_of(previous, (char *)got, size, 0))
			return -1;
		for (int i = 0; i < count; i++)
			values[i] += got[i];
		memcpy(passed, got, size);
	}
	return 0;
}

int receive(int previous, double *values, int count)
{
	return all_of(previous, (char *)values, (size_t)count * sizeof *values, 0);
}
