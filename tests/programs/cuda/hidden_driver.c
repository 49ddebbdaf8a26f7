// SPDX-License-Identifier: Apache-2.0
/*
 * A stand-in for the CUDA driver's way of handing out functions that no symbol names. As a library it
 * knows cuMemAlloc (in two versions) and cuMemcpyHtoD; cuMemAlloc_v2 alone is exported, too, elsewhere.
 */
#include <stddef.h>
#include <string.h>

static volatile size_t work;

static __attribute__((noipa)) int alloc_hidden(void **there, size_t size)
{
	volatile size_t room = size;

	__asm__ volatile("" ::: "rbx");
	work += room;
	return 0;
}

static __attribute__((noipa)) int alloc_per_thread(void **there, size_t size)
{
	volatile size_t room = size;

	__asm__ volatile("" ::: "rbx", "r12");
	work += room;
	return 0;
}

static __attribute__((noipa)) int copy_hidden(void *there, const void *here, size_t size)
{
	volatile size_t room = size;

	__asm__ volatile("" ::: "rbx", "r12", "r13");
	work += room;
	return 0;
}

__attribute__((visibility("default"), noipa)) int cuMemAlloc_v2(void **there, size_t size)
{
	volatile int status = alloc_hidden(there, size);

	return status;
}

__attribute__((visibility("default"))) int cuGetProcAddress_v2(const char *symbol, void **found,
							       int version,
							       unsigned long long flags,
							       int *status)
{
	*found = NULL;
	if (!strcmp(symbol, "cuMemAlloc"))
		*found = flags == 2 ? (void *)alloc_per_thread : (void *)alloc_hidden;
	if (!strcmp(symbol, "cuMemcpyHtoD") && version >= 7000)
		*found = (void *)copy_hidden;
	*status = *found ? 0 : 1;
	return *found ? 0 : 500;
}
