/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the CUDA driver's interface that the library uses, by its public documentation. Names in capitals that
 * begin with CU_ shorten those of cuda.h (CU_OK: CUDA_SUCCESS). */
#ifndef SONDE_DRIVER_H
#define SONDE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result;
typedef void *cu_context, *cu_stream, *cu_event, *cu_function, *cu_module, *cu_graph_exec;
typedef uint64_t cu_pointer;

enum {
	CU_OK = 0,
	CU_NOT_READY = 600,
	CU_HOST_PORTABLE = 1,
	CU_STREAM_CAPTURE_NONE = 0,
	CU_CAPTURE_MODE_RELAXED = 2,
	CU_MEMORY_TYPE_OF = 2, /* of cuPointerGetAttribute */
	CU_MEMORY_HOST = 1,
	CU_MEMORY_DEVICE = 2,
	CU_MEMORY_ARRAY = 3,
	/* Errors from 700 to 719 are taken for sticky ones, which leave a context unusable. A few are not
	 * (701: a launch lacked resources): then nothing more is timed in that context. */
	CU_STICKY_FROM = 700,
	CU_STICKY_TO = 720,
};
/* Handles of the two default streams. */
#define CU_LEGACY ((cu_stream)1)
#define CU_PER_THREAD ((cu_stream)2)

struct cu_launch_config { /* CUlaunchConfig */
	unsigned grid[3], block[3], shared_bytes;
	cu_stream stream;
	void *attributes;
	unsigned attribute_count;
};

struct cu_copy_2d { /* CUDA_MEMCPY2D */
	size_t from_x, from_y;
	int from_type;
	const void *from_host;
	cu_pointer from_device;
	void *from_array;
	size_t from_pitch, to_x, to_y;
	int to_type;
	void *to_host;
	cu_pointer to_device;
	void *to_array;
	size_t to_pitch, width_bytes, height;
};

/* Name as exported, arguments; each returns cu_result. Those of DRIVER_OPTIONAL may be missing. */
#define DRIVER_FUNCTIONS(X)                                                                        \
	X(cuDriverGetVersion, (int *))                                                             \
	X(cuCtxGetCurrent, (cu_context *))                                                         \
	X(cuCtxPushCurrent_v2, (cu_context))                                                       \
	X(cuCtxPopCurrent_v2, (cu_context *))                                                      \
	X(cuCtxGetDevice, (int *))                                                                 \
	X(cuEventCreate, (cu_event *, unsigned))                                                   \
	X(cuEventDestroy_v2, (cu_event))                                                           \
	X(cuEventRecord, (cu_event, cu_stream))                                                    \
	X(cuEventQuery, (cu_event))                                                                \
	X(cuEventElapsedTime, (float *, cu_event, cu_event))                                       \
	X(cuStreamIsCapturing, (cu_stream, int *))                                                 \
	X(cuThreadExchangeStreamCaptureMode, (int *))                                              \
	X(cuModuleLoadData, (cu_module *, const void *))                                           \
	X(cuModuleGetFunction, (cu_function *, cu_module, const char *))                           \
	X(cuMemHostAlloc, (void **, size_t, unsigned))

#define DRIVER_OPTIONAL(X)                                                                         \
	X(cuFuncGetName, (const char **, cu_function))                                             \
	X(cuKernelGetName, (const char **, cu_function))                                           \
	X(cuCtxGetId, (cu_context, unsigned long long *))                                          \
	X(cuDevicePrimaryCtxGetState, (int, unsigned *, int *))                                    \
	X(cuPointerGetAttribute, (void *, int, cu_pointer))

/* Of functions that are hooked: their parameters with types, and the names of these, for HOOK (cuda.h). */
#define LAUNCH_PARAMETERS                                                                          \
	(cu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,           \
	 unsigned bz, unsigned shared_bytes, cu_stream stream, void **parameters, void **extra)
#define LAUNCH_VALUES (f, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, extra)
#define COOPERATIVE_PARAMETERS                                                                     \
	(cu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,           \
	 unsigned bz, unsigned shared_bytes, cu_stream stream, void **parameters)
#define COOPERATIVE_VALUES (f, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters)
#define EXTENSIBLE_PARAMETERS                                                                      \
	(const struct cu_launch_config *config, cu_function f, void **parameters, void **extra)
#define EXTENSIBLE_VALUES (config, f, parameters, extra)
#define TO_DEVICE_PARAMETERS (cu_pointer to, const void *from, size_t bytes, cu_stream stream)
#define TO_HOST_PARAMETERS (void *to, cu_pointer from, size_t bytes, cu_stream stream)
#define COPY_PARAMETERS (cu_pointer to, cu_pointer from, size_t bytes, cu_stream stream)
#define COPY_VALUES (to, from, bytes, stream)
#define PEER_PARAMETERS                                                                            \
	(cu_pointer to, cu_context to_context, cu_pointer from, cu_context from_context,           \
	 size_t bytes, cu_stream stream)
#define PEER_VALUES (to, to_context, from, from_context, bytes, stream)
#define COPY_2D_PARAMETERS (const struct cu_copy_2d *copy, cu_stream stream)
#define COPY_2D_VALUES (copy, stream)
#define SET_8_PARAMETERS (cu_pointer to, unsigned char value, size_t count, cu_stream stream)
#define SET_16_PARAMETERS (cu_pointer to, unsigned short value, size_t count, cu_stream stream)
#define SET_32_PARAMETERS (cu_pointer to, unsigned value, size_t count, cu_stream stream)
#define SET_VALUES (to, value, count, stream)
#define STREAM_PARAMETERS (cu_stream stream)
#define STREAM_VALUES (stream)
#define EVENT_PARAMETERS (cu_event event)
#define EVENT_VALUES (event)
#define REPLAY_PARAMETERS (cu_graph_exec graph, cu_stream stream)
#define REPLAY_VALUES (graph, stream)

#pragma GCC visibility push(hidden)
/* ---- cuda.c: for a thread of ours, before it calls the driver or CUPTI ---- */
void cuda_relax_thread(void);
#pragma GCC visibility pop

#endif
