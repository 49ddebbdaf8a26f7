// SPDX-License-Identifier: Apache-2.0
// What the storms load: a constructor that starts a thread, as the real library will.
// STORM_SLEEPY: a constructor that sleeps for a second, inside the loader.
// STORM_LOCKED: a constructor that first waits for the program's own mutex (the trap of storm.c).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

static void *beat(void *arg)
{
	(void)arg;
	prctl(PR_SET_NAME, "storm-beat");
	for (int i = 0; i < 20; i++) {
		free(malloc(4096));
		usleep(1000);
	}
	return NULL;
}

__attribute__((constructor)) static void begin(void)
{
	if (__builtin_ia32_readeflags_u64() & 0x400)
		abort(); // the direction flag of the thread that was borrowed
#ifdef STORM_LOCKED
	pthread_mutex_t *m = dlsym(RTLD_DEFAULT, "trap_lock");
	if (m)
		pthread_mutex_lock(m), pthread_mutex_unlock(m);
#endif
#ifdef STORM_SLEEPY
	usleep(1000000);
#endif
	pthread_t t;
	pthread_attr_t a;
	pthread_attr_init(&a);
	pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
	if (pthread_create(&t, &a, beat, NULL))
		abort();
}
