// SPDX-License-Identifier: Apache-2.0
/*
 * A loader to link into a program: its own symbol table carries the OpenCL entry points, and each
 * calls the one of the library of that name, which is opened at run time. A call is then made twice,
 * one inside the other, and must count once.
 */
#define CL_TARGET_OPENCL_VERSION 120
#define CL_USE_DEPRECATED_OPENCL_1_1_APIS
#include <CL/cl.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static void *below(const char *function)
{
	static void *library;
	void *found;

	if (!library)
		library = dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_LOCAL);
	found = library ? dlsym(library, function) : NULL;
	if (!found) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	return found;
}

/* The pointer below must not be called as a sibling: the outer frame has to stay. */
#define FORWARD(type, function, parameters, arguments)                                             \
	type function parameters                                                                   \
	{                                                                                          \
		static type(*next) parameters;                                                     \
		volatile type result;                                                              \
                                                                                                   \
		if (!next)                                                                         \
			next = below(#function);                                                   \
		result = next arguments;                                                           \
		return result;                                                                     \
	}

FORWARD(cl_int, clGetPlatformIDs, (cl_uint n, cl_platform_id *ids, cl_uint *count), (n, ids, count))
FORWARD(cl_int, clGetDeviceIDs,
	(cl_platform_id platform, cl_device_type type, cl_uint n, cl_device_id *ids,
	 cl_uint *count),
	(platform, type, n, ids, count))
FORWARD(cl_context, clCreateContext,
	(const cl_context_properties *properties, cl_uint n, const cl_device_id *devices,
	 void(CL_CALLBACK *notify)(const char *, const void *, size_t, void *), void *data,
	 cl_int *status),
	(properties, n, devices, notify, data, status))
FORWARD(cl_command_queue, clCreateCommandQueue,
	(cl_context context, cl_device_id device, cl_command_queue_properties properties,
	 cl_int *status),
	(context, device, properties, status))
FORWARD(cl_int, clReleaseContext, (cl_context context), (context))
FORWARD(cl_int, clReleaseCommandQueue, (cl_command_queue queue), (queue))
FORWARD(cl_mem, clCreateBuffer,
	(cl_context context, cl_mem_flags flags, size_t size, void *host, cl_int *status),
	(context, flags, size, host, status))
FORWARD(cl_int, clReleaseMemObject, (cl_mem memory), (memory))
FORWARD(cl_int, clFinish, (cl_command_queue queue), (queue))
FORWARD(cl_int, clEnqueueWriteBuffer,
	(cl_command_queue queue, cl_mem buffer, cl_bool blocking, size_t offset, size_t size,
	 const void *host, cl_uint n, const cl_event *list, cl_event *event),
	(queue, buffer, blocking, offset, size, host, n, list, event))
FORWARD(cl_int, clEnqueueReadBuffer,
	(cl_command_queue queue, cl_mem buffer, cl_bool blocking, size_t offset, size_t size,
	 void *host, cl_uint n, const cl_event *list, cl_event *event),
	(queue, buffer, blocking, offset, size, host, n, list, event))
FORWARD(cl_int, clEnqueueCopyBuffer,
	(cl_command_queue queue, cl_mem from, cl_mem to, size_t from_offset, size_t to_offset,
	 size_t size, cl_uint n, const cl_event *list, cl_event *event),
	(queue, from, to, from_offset, to_offset, size, n, list, event))
