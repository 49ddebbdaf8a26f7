/* SPDX-License-Identifier: Apache-2.0 */
/* What the stub answers: read from the file that NVML_STUB names, again when it is another one, a line
 * each: `key=value`, or `0.key=value` for the first device alone. `fail.FUNCTION=code` makes a
 * function fail, `hang.FUNCTION=1` makes it hang until the line is gone, `crash.FUNCTION=1` kills the
 * process. */
#ifndef NVML_STUB_ANSWERS_H
#define NVML_STUB_ANSWERS_H

#include <nvml.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { DEVICES = 16, TEXT = 1024, MIG = 0x100 };

/* A handle is 1 + the number of the device, plus MIG * (1 + instance) for an instance of it. */
static unsigned int device_of(nvmlDevice_t handle)
{
	return (unsigned int)((uintptr_t)handle % MIG) - 1;
}

static int instance_of(nvmlDevice_t handle)
{
	return (int)((uintptr_t)handle / MIG) - 1;
}

/* Between two looks at the file: a question is not to cost much more here than in a driver. */
#define LOOKS_NS 20000000

/* The whole file, as it was a moment ago. */
static const char *answers(void)
{
	static char text[1 << 16];
	static struct stat known;
	static int64_t looked_ns;
	const char *path = getenv("NVML_STUB");
	struct timespec time;
	struct stat now;
	int64_t now_ns;
	FILE *file;

	clock_gettime(CLOCK_MONOTONIC, &time);
	now_ns = time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
	if (looked_ns && now_ns - looked_ns < LOOKS_NS)
		return text;
	looked_ns = now_ns;
	if (!path || stat(path, &now)) {
		text[0] = '\0';
		return text;
	}
	if (now.st_ino == known.st_ino && now.st_mtim.tv_sec == known.st_mtim.tv_sec &&
	    now.st_mtim.tv_nsec == known.st_mtim.tv_nsec)
		return text;
	file = fopen(path, "r");
	if (!file) {
		text[0] = '\0';
		return text;
	}
	text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
	fclose(file);
	known = now;
	return text;
}

static int look_up(const char *key, char *value)
{
	size_t length = strlen(key);
	int found = 0;

	for (const char *line = answers(); line && *line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (strncmp(line, key, length) == 0 && line[length] == '=') {
			size_t size = strcspn(line + length + 1, "\n");

			memcpy(value, line + length + 1, size);
			value[size] = '\0';
			found = 1;
		}
	}
	return found;
}

static int text_of(nvmlDevice_t handle, const char *key, char *value)
{
	char full[TEXT];

	snprintf(full, sizeof(full), "%u.%s", device_of(handle), key);
	return look_up(full, value) || look_up(key, value);
}

static double number_of(nvmlDevice_t handle, const char *key, double otherwise)
{
	char value[TEXT];

	return text_of(handle, key, value) ? strtod(value, NULL) : otherwise;
}

static nvmlReturn_t answer(nvmlDevice_t handle, const char *function)
{
	char key[TEXT];

	snprintf(key, sizeof(key), "crash.%s", function);
	if (number_of(handle, key, 0))
		raise(SIGSEGV);
	snprintf(key, sizeof(key), "hang.%s", function);
	while (number_of(handle, key, 0))
		usleep(20000);
	if (handle && number_of(handle, "lost", 0))
		return NVML_ERROR_GPU_IS_LOST;
	snprintf(key, sizeof(key), "fail.%s", function);
	return (nvmlReturn_t)number_of(handle, key, 0);
}

#define ANSWER(handle)                                                                             \
	do {                                                                                       \
		nvmlReturn_t code_ = answer(handle, __func__);                                     \
		if (code_)                                                                         \
			return code_;                                                              \
	} while (0)
#define NUMBER(name, type, out, key, otherwise)                                                    \
	nvmlReturn_t name(nvmlDevice_t device, type *out)                                          \
	{                                                                                          \
		ANSWER(device);                                                                    \
		*out = (type)number_of(device, key, otherwise);                                    \
		return NVML_SUCCESS;                                                               \
	}

#endif
