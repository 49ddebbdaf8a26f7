// SPDX-License-Identifier: Apache-2.0
/*
 * Makes a known number of OpenCL calls and prints how many.
 *
 * copies COUNT [hold]   COUNT buffers made and released, COUNT copies in three directions; the truth
 *                       goes to standard output, one "function count bytes" a line. With `hold`
 *                       it prints "ready" once all is set up and waits for a line before it starts.
 */
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST (64 * 1024)

static void check(cl_int status, const char *what)
{
	if (status != CL_SUCCESS) {
		fprintf(stderr, "%s: %d\n", what, status);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 1000;
	static char host[LARGEST];
	long calls[3] = {}, bytes[3] = {}, buffer_bytes = 0, finishes = 0;
	cl_platform_id platform;
	cl_device_id device;
	cl_context context;
	cl_command_queue queue;
	cl_mem from, to;
	cl_int status;

	check(clGetPlatformIDs(1, &platform, NULL), "platforms");
	check(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL), "devices");
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &status);
	check(status, "context");
	queue = clCreateCommandQueue(context, device, 0, &status);
	check(status, "queue");
	if (argc > 2 && !strcmp(argv[2], "hold")) {
		puts("ready");
		fflush(stdout);
		if (getchar() == EOF)
			return 1;
	}
	from = clCreateBuffer(context, CL_MEM_READ_WRITE, LARGEST, NULL, &status);
	to = clCreateBuffer(context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, LARGEST, host,
			    &status);
	check(status, "buffer");
	for (long i = 0; i < count; i++) {
		size_t size = 16 + (size_t)(i * 37 % 1009);
		cl_mem one = clCreateBuffer(context, CL_MEM_READ_ONLY, size, NULL,
					    i % 2 ? &status : NULL);

		buffer_bytes += size;
		clReleaseMemObject(one);
		switch (i % 3) {
		case 0:
			status = clEnqueueWriteBuffer(queue, from, CL_TRUE, i % 64, size, host, 0,
						      NULL, NULL);
			break;
		case 1:
			status = clEnqueueCopyBuffer(queue, from, to, 0, i % 64, size, 0, NULL,
						     NULL);
			break;
		case 2:
			status =
				clEnqueueReadBuffer(queue, to, i & 1, 0, size, host, 0, NULL, NULL);
			break;
		}
		check(status, "copy");
		calls[i % 3]++;
		bytes[i % 3] += size;
		if (i % 1000 == 999) {
			clFinish(queue);
			finishes++;
		}
	}
	clFinish(queue);
	clReleaseMemObject(from);
	clReleaseMemObject(to);
	printf("clCreateBuffer %ld %ld\n", count + 2, buffer_bytes + 2L * LARGEST);
	printf("clReleaseMemObject %ld 0\n", count + 2);
	printf("clEnqueueWriteBuffer %ld %ld\n", calls[0], bytes[0]);
	printf("clEnqueueCopyBuffer %ld %ld\n", calls[1], bytes[1]);
	printf("clEnqueueReadBuffer %ld %ld\n", calls[2], bytes[2]);
	printf("clFinish %ld 0\n", finishes + 1);
	clReleaseCommandQueue(queue);
	clReleaseContext(context);
	return 0;
}
