// SPDX-License-Identifier: Apache-2.0
/* One call of each kind, so that every way of reading arguments is held against the truth. */
#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>

#define SIZE 65536

static void report(const char *function, size_t bytes, const char *direction, cl_int status)
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
	report("clCreateBuffer", SIZE, "-", status);
	b = clCreateBuffer(context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, SIZE, host, NULL);
	report("clCreateBuffer", SIZE, "h2d", 0);
	clCreateBuffer(context, CL_MEM_READ_WRITE, 0, NULL, &status);
	report("clCreateBuffer", 0, "-", status);
	clCreateBuffer(context, CL_MEM_READ_WRITE, 0, NULL, NULL);
	report("clCreateBuffer", 0, "-", (cl_int)0x80000000);

	status = clEnqueueWriteBuffer(queue, a, CL_TRUE, 3, 1001, host, 0, NULL, NULL);
	report("clEnqueueWriteBuffer", 1001, "h2d", status);
	status = clEnqueueReadBuffer(queue, a, CL_TRUE, 0, 2002, host, 0, NULL, NULL);
	report("clEnqueueReadBuffer", 2002, "d2h", status);
	status = clEnqueueReadBuffer(queue, a, CL_TRUE, SIZE, 8, host, 0, NULL, NULL);
	report("clEnqueueReadBuffer", 8, "d2h", status);
	status = clEnqueueWriteBufferRect(queue, a, CL_TRUE, origin, origin, region, 64, 1024, 32,
					  512, host, 0, NULL, NULL);
	report("clEnqueueWriteBufferRect", 512, "h2d", status);
	status = clEnqueueReadBufferRect(queue, a, CL_TRUE, origin, origin, region, 0, 0, 0, 0,
					 host, 0, NULL, NULL);
	report("clEnqueueReadBufferRect", 512, "d2h", status);
	status = clEnqueueCopyBuffer(queue, a, b, 0, 7, 3003, 0, NULL, NULL);
	report("clEnqueueCopyBuffer", 3003, "d2d", status);
	status = clEnqueueCopyBufferRect(queue, a, b, origin, origin, region, 64, 1024, 64, 1024, 0,
					 NULL, NULL);
	report("clEnqueueCopyBufferRect", 512, "d2d", status);
	status = clEnqueueFillBuffer(queue, a, pattern, sizeof(pattern), 0, 4004, 0, NULL, NULL);
	report("clEnqueueFillBuffer", 4004, "-", status);

	mapped =
		clEnqueueMapBuffer(queue, a, CL_TRUE, CL_MAP_READ, 16, 505, 0, NULL, NULL, &status);
	report("clEnqueueMapBuffer", 505, "d2h", status);
	status = clEnqueueUnmapMemObject(queue, a, mapped, 0, NULL, NULL);
	report("clEnqueueUnmapMemObject", 0, "-", status);
	mapped = clEnqueueMapBuffer(queue, a, CL_TRUE, CL_MAP_WRITE, 0, 606, 0, NULL, NULL, NULL);
	report("clEnqueueMapBuffer", 606, "h2d", 0);
	status = clEnqueueUnmapMemObject(queue, a, mapped, 0, NULL, NULL);
	report("clEnqueueUnmapMemObject", 0, "-", status);
	clEnqueueMapBuffer(queue, a, CL_TRUE, CL_MAP_READ, SIZE, 1, 0, NULL, NULL, &status);
	report("clEnqueueMapBuffer", 1, "d2h", status);

	shared = clSVMAlloc(context, CL_MEM_READ_WRITE, 8192, 0);
	report("clSVMAlloc", 8192, "-", 0);
	status = clEnqueueSVMMemcpy(queue, CL_TRUE, shared, host, 707, 0, NULL, NULL);
	report("clEnqueueSVMMemcpy", 707, "unknown", status);
	status = clEnqueueSVMMap(queue, CL_TRUE, CL_MAP_READ, shared, 808, 0, NULL, NULL);
	report("clEnqueueSVMMap", 808, "d2h", status);
	status = clEnqueueSVMUnmap(queue, shared, 0, NULL, NULL);
	report("clEnqueueSVMUnmap", 0, "-", status);
	status = clEnqueueSVMMemFill(queue, shared, pattern, sizeof(pattern), 908, 0, NULL, NULL);
	report("clEnqueueSVMMemFill", 908, "-", status);
	clFinish(queue);
	report("clFinish", 0, "-", 0);
	clSVMFree(context, shared);
	report("clSVMFree", 0, "-", 0);

	program = clCreateProgramWithSource(context, 1, &broken, NULL, &status);
	status = clBuildProgram(program, 1, &device, "", NULL, NULL);
	report("clBuildProgram", 0, "-", status);
	program = clCreateProgramWithSource(context, 1, &source, NULL, &status);
	status = clBuildProgram(program, 1, &device, "", NULL, NULL);
	report("clBuildProgram", 0, "-", status);
	kernel = clCreateKernel(program, "add", &status);
	clSetKernelArg(kernel, 0, sizeof(a), &a);
	status = clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &items, NULL, 0, NULL, &event);
	report("clEnqueueNDRangeKernel", 0, "-", status);
	status = clFlush(queue);
	report("clFlush", 0, "-", status);
	status = clWaitForEvents(1, &event);
	report("clWaitForEvents", 0, "-", status);
	status = clReleaseMemObject(b);
	report("clReleaseMemObject", 0, "-", status);
	return 0;
}
