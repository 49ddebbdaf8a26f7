// SPDX-License-Identifier: Apache-2.0
/* One call of each kind, so that every way of reading arguments is held against the truth. */
#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>

#define SIZE 65536

static void tell(const char *function, size_t bytes, const char *direction, cl_int status)
{
	printf("%s %zu %s %d\n", function, bytes, direction, status);
}

int main(void)
{
	static char host[SIZE];
	size_t origin[3] = {0, 0, 0}, region[3] = {16, 8, 4};
	char pattern[4] = {1, 2, 3, 4};
	const char *source = "__kernel void add(__global int *x) { x[get_global_id(0)] += 1; }";
	const char *broken = "__kernel void add(__global int *x) { nonsense }";
	size_t items = 64;
	cl_platform_id platform;
	cl_device_id device;
	cl_context context;
	cl_command_queue queue;
	cl_program program;
	cl_kernel kernel;
	cl_mem a, b;
	cl_event event;
	cl_int status;
	void *shared, *mapped;

	if (clGetPlatformIDs(1, &platform, NULL) ||
	    clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL))
		return 1;
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &status);
	queue = clCreateCommandQueue(context, device, 0, &status);

	a = clCreateBuffer(context, CL_MEM_READ_WRITE, SIZE, NULL, &status);
	tell("clCreateBuffer", SIZE, "-", status);
	b = clCreateBuffer(context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, SIZE, host, NULL);
	tell("clCreateBuffer", SIZE, "h2d", 0);
	clCreateBuffer(context, CL_MEM_READ_WRITE, 0, NULL, &status);
	tell("clCreateBuffer", 0, "-", status);
	clCreateBuffer(context, CL_MEM_READ_WRITE, 0, NULL, NULL);
	tell("clCreateBuffer", 0, "-", (cl_int)0x80000000);

	status = clEnqueueWriteBuffer(queue, a, CL_TRUE, 3, 1001, host, 0, NULL, NULL);
	tell("clEnqueueWriteBuffer", 1001, "h2d", status);
	status = clEnqueueReadBuffer(queue, a, CL_TRUE, 0, 2002, host, 0, NULL, NULL);
	tell("clEnqueueReadBuffer", 2002, "d2h", status);
	status = clEnqueueReadBuffer(queue, a, CL_TRUE, SIZE, 8, host, 0, NULL, NULL);
	tell("clEnqueueReadBuffer", 8, "d2h", status);
	status = clEnqueueWriteBufferRect(queue, a, CL_TRUE, origin, origin, region, 64, 1024, 32,
					  512, host, 0, NULL, NULL);
	tell("clEnqueueWriteBufferRect", 512, "h2d", status);
	status = clEnqueueReadBufferRect(queue, a, CL_TRUE, origin, origin, region, 0, 0, 0, 0,
					 host, 0, NULL, NULL);
	tell("clEnqueueReadBufferRect", 512, "d2h", status);
	status = clEnqueueCopyBuffer(queue, a, b, 0, 7, 3003, 0, NULL, NULL);
	tell("clEnqueueCopyBuffer", 3003, "d2d", status);
	status = clEnqueueCopyBufferRect(queue, a, b, origin, origin, region, 64, 1024, 64, 1024, 0,
					 NULL, NULL);
	tell("clEnqueueCopyBufferRect", 512, "d2d", status);
	status = clEnqueueFillBuffer(queue, a, pattern, sizeof(pattern), 0, 4004, 0, NULL, NULL);
	tell("clEnqueueFillBuffer", 4004, "-", status);

	mapped =
		clEnqueueMapBuffer(queue, a, CL_TRUE, CL_MAP_READ, 16, 505, 0, NULL, NULL, &status);
	tell("clEnqueueMapBuffer", 505, "d2h", status);
	status = clEnqueueUnmapMemObject(queue, a, mapped, 0, NULL, NULL);
	tell("clEnqueueUnmapMemObject", 0, "-", status);
	mapped = clEnqueueMapBuffer(queue, a, CL_TRUE, CL_MAP_WRITE, 0, 606, 0, NULL, NULL, NULL);
	tell("clEnqueueMapBuffer", 606, "h2d", 0);
	status = clEnqueueUnmapMemObject(queue, a, mapped, 0, NULL, NULL);
	tell("clEnqueueUnmapMemObject", 0, "-", status);
	clEnqueueMapBuffer(queue, a, CL_TRUE, CL_MAP_READ, SIZE, 1, 0, NULL, NULL, &status);
	tell("clEnqueueMapBuffer", 1, "d2h", status);

	shared = clSVMAlloc(context, CL_MEM_READ_WRITE, 8192, 0);
	tell("clSVMAlloc", 8192, "-", 0);
	status = clEnqueueSVMMemcpy(queue, CL_TRUE, shared, host, 707, 0, NULL, NULL);
	tell("clEnqueueSVMMemcpy", 707, "unknown", status);
	status = clEnqueueSVMMap(queue, CL_TRUE, CL_MAP_READ, shared, 808, 0, NULL, NULL);
	tell("clEnqueueSVMMap", 808, "d2h", status);
	status = clEnqueueSVMUnmap(queue, shared, 0, NULL, NULL);
	tell("clEnqueueSVMUnmap", 0, "-", status);
	status = clEnqueueSVMMemFill(queue, shared, pattern, sizeof(pattern), 908, 0, NULL, NULL);
	tell("clEnqueueSVMMemFill", 908, "-", status);
	clFinish(queue);
	tell("clFinish", 0, "-", 0);
	clSVMFree(context, shared);
	tell("clSVMFree", 0, "-", 0);

	program = clCreateProgramWithSource(context, 1, &broken, NULL, &status);
	status = clBuildProgram(program, 1, &device, "", NULL, NULL);
	tell("clBuildProgram", 0, "-", status);
	program = clCreateProgramWithSource(context, 1, &source, NULL, &status);
	status = clBuildProgram(program, 1, &device, "", NULL, NULL);
	tell("clBuildProgram", 0, "-", status);
	kernel = clCreateKernel(program, "add", &status);
	clSetKernelArg(kernel, 0, sizeof(a), &a);
	status = clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &items, NULL, 0, NULL, &event);
	tell("clEnqueueNDRangeKernel", 0, "-", status);
	status = clFlush(queue);
	tell("clFlush", 0, "-", status);
	status = clWaitForEvents(1, &event);
	tell("clWaitForEvents", 0, "-", status);
	status = clReleaseMemObject(b);
	tell("clReleaseMemObject", 0, "-", status);
	return 0;
}
