// SPDX-License-Identifier: Apache-2.0
// Stands in for libOpenCL.so.1: the entry points that tests/programs/opencl/copies.c calls, each of
// which does nothing and succeeds. What is to be seen of a call are its arguments.
#define CL_TARGET_OPENCL_VERSION 120
#define CL_USE_DEPRECATED_OPENCL_1_1_APIS
#include <CL/cl.h>

static char object; // its address is every handle
static volatile int work;

#define HANDLE(type, function, parameters)                                                         \
	type function parameters                                                                   \
	{                                                                                          \
		work++;                                                                            \
		if (status)                                                                        \
			*status = CL_SUCCESS;                                                      \
		return (type)&object;                                                              \
	}

#define SUCCEED(function, parameters)                                                              \
	cl_int function parameters                                                                 \
	{                                                                                          \
		work++;                                                                            \
		return CL_SUCCESS;                                                                 \
	}

#pragma GCC diagnostic ignored "-Wunused-parameter"

cl_int clGetPlatformIDs(cl_uint n, cl_platform_id *ids, cl_uint *count)
{
	*ids = (cl_platform_id)&object;
	return CL_SUCCESS;
}

cl_int clGetDeviceIDs(cl_platform_id platform, cl_device_type type, cl_uint n, cl_device_id *ids,
		      cl_uint *count)
{
	*ids = (cl_device_id)&object;
	return CL_SUCCESS;
}

HANDLE(cl_context, clCreateContext,
       (const cl_context_properties *properties, cl_uint n, const cl_device_id *devices,
	void(CL_CALLBACK *notify)(const char *, const void *, size_t, void *), void *data,
	cl_int *status))
HANDLE(cl_command_queue, clCreateCommandQueue,
       (cl_context context, cl_device_id device, cl_command_queue_properties properties,
	cl_int *status))
HANDLE(cl_mem, clCreateBuffer,
       (cl_context context, cl_mem_flags flags, size_t size, void *host, cl_int *status))
SUCCEED(clReleaseContext, (cl_context context))
SUCCEED(clReleaseCommandQueue, (cl_command_queue queue))
SUCCEED(clReleaseMemObject, (cl_mem memory))
SUCCEED(clFinish, (cl_command_queue queue))
SUCCEED(clEnqueueWriteBuffer,
	(cl_command_queue queue, cl_mem buffer, cl_bool blocking, size_t offset, size_t size,
	 const void *host, cl_uint n, const cl_event *list, cl_event *event))
SUCCEED(clEnqueueReadBuffer,
	(cl_command_queue queue, cl_mem buffer, cl_bool blocking, size_t offset, size_t size,
	 void *host, cl_uint n, const cl_event *list, cl_event *event))
SUCCEED(clEnqueueCopyBuffer,
	(cl_command_queue queue, cl_mem from, cl_mem to, size_t from_offset, size_t to_offset,
	 size_t size, cl_uint n, const cl_event *list, cl_event *event))
