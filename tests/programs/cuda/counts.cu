// SPDX-License-Identifier: Apache-2.0
/*
 * counts COUNT [hold]: CUDA calls of every kind, COUNT times each, and how many they were: one
 * "function direction status count bytes" a line. Where there is no device every call fails; it is
 * a call all the same. The driver is called as its symbols are exported, then through the pointers
 * that cuGetProcAddress hands out.
 *
 * nvcc compiles it as CUDA; a C++ compiler with the headers of the runtime does, too, without the
 * parts that need device code.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
	const char *function, *direction;
	int status;
	long count, bytes;
} truth[512];

static int note(const char *function, const char *direction, size_t bytes, int status)
{
	int i = 0;

	while (truth[i].function &&
	       (strcmp(truth[i].function, function) || strcmp(truth[i].direction, direction) ||
		truth[i].status != status))
		i++;
	truth[i].function = function;
	truth[i].direction = direction;
	truth[i].status = status;
	truth[i].count++;
	truth[i].bytes += (long)bytes;
	return status;
}

#define CALL(direction, bytes, function, ...)                                                      \
	note(#function, direction, bytes, (int)function(__VA_ARGS__))

#ifdef __CUDACC__
__device__ char symbol[4096];

__global__ void add_one(char *there)
{
	there[threadIdx.x]++;
}
#endif

static char host[1 << 20];

static void runtime(long i)
{
	size_t size = 64 + (size_t)(i * 37 % 1009);
	char *there = NULL, *other = NULL, *pinned = NULL;
	struct cudaPitchedPtr cube = {0};
	struct cudaExtent extent = {64, 8, 4};
	struct cudaMemcpy3DParms parms = {0};
	size_t pitch = 0;
	static cudaStream_t stream;
	static cudaEvent_t event;

	if (!stream)
		cudaStreamCreate(&stream);
	if (!event)
		cudaEventCreateWithFlags(&event, cudaEventDefault);
	CALL("-", 65536 + size, cudaMalloc, (void **)&there, 65536 + size);
	CALL("-", 65536, cudaMallocAsync, (void **)&other, 65536, stream);
	CALL("-", size, cudaMallocHost, (void **)&pinned, size);
	CALL("h2d", size, cudaMemcpy, there, host, size, cudaMemcpyHostToDevice);
	CALL("d2h", size / 2, cudaMemcpy, host, there, size / 2, cudaMemcpyDeviceToHost);
	CALL("unknown", 17, cudaMemcpy, there, host, 17, cudaMemcpyDefault);
	CALL("h2h", 33, cudaMemcpy, host, host + 4096, 33, cudaMemcpyHostToHost);
	CALL("h2d", size, cudaMemcpyAsync, there, pinned, size, cudaMemcpyHostToDevice, stream);
	CALL("d2d", size, cudaMemcpyAsync, other, there, size, cudaMemcpyDeviceToDevice, stream);
	CALL("d2h", size, cudaMemcpyAsync, pinned, other, size, cudaMemcpyDeviceToHost, stream);
	CALL("-", 0, cudaStreamSynchronize, stream);
	CALL("h2d", 48 * 8, cudaMemcpy2D, there, 64, host, 128, 48, 8, cudaMemcpyHostToDevice);
	CALL("d2h", 32 * 4, cudaMemcpy2DAsync, host, 64, there, 64, 32, 4, cudaMemcpyDeviceToHost,
	     stream);
	CALL("-", 64 * 8 * 4, cudaMalloc3D, &cube, extent);
	parms.srcPtr.ptr = host;
	parms.srcPtr.pitch = 64;
	parms.srcPtr.xsize = 64;
	parms.srcPtr.ysize = 8;
	parms.dstPtr = cube;
	parms.extent = extent;
	parms.kind = cudaMemcpyHostToDevice;
	CALL("h2d", 64 * 8 * 4, cudaMemcpy3D, &parms);
	CALL("-", 64 * 8 * 4, cudaMemset3D, cube, 1, extent);
	CALL("-", size, cudaMemset, there, 1, size);
	CALL("-", size, cudaMemsetAsync, there, 1, size, stream);
	CALL("-", 0, cudaFree, cube.ptr);
	CALL("-", 100 * 10, cudaMallocPitch, (void **)&cube.ptr, &pitch, 100, 10);
	CALL("-", 90 * 10, cudaMemset2D, cube.ptr, pitch, 1, 90, 10);
	CALL("-", 0, cudaFree, cube.ptr);
#ifdef __CUDACC__
	CALL("h2d", 100, cudaMemcpyToSymbol, symbol, host, 100, 0, cudaMemcpyHostToDevice);
	CALL("d2h", 50, cudaMemcpyFromSymbol, host, symbol, 50, 0, cudaMemcpyDeviceToHost);
	add_one<<<1, 32, 0, stream>>>(there);
	note("cudaLaunchKernel", "-", 0, 0);
#endif
	cudaEventRecord(event, stream);
	CALL("-", 0, cudaStreamWaitEvent, stream, event, 0);
	CALL("-", 0, cudaEventSynchronize, event);
	CALL("-", 0, cudaDeviceSynchronize);
	CALL("-", 8192, cudaHostRegister, host + 8192, 8192, cudaHostRegisterDefault);
	CALL("-", 0, cudaHostUnregister, host + 8192);
	CALL("-", 0, cudaFreeAsync, other, stream);
	CALL("-", 0, cudaFree, there);
	CALL("-", 0, cudaFreeHost, pinned);
	cudaGetLastError();
}

static void graphs(long count)
{
	cudaStream_t stream = NULL;
	cudaGraph_t graph = NULL;
	cudaGraphExec_t exec = NULL;
	char *there = NULL;

	cudaStreamCreate(&stream);
	CALL("-", 4096, cudaMalloc, (void **)&there, 4096);
	if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess)
		return;
	CALL("-", 4096, cudaMemsetAsync, there, 0, 4096, stream);
	cudaStreamEndCapture(stream, &graph);
	CALL("-", 0, cudaGraphInstantiate, &exec, graph, 0);
	for (long i = 0; i < count; i++)
		CALL("-", 0, cudaGraphLaunch, exec, stream);
	CALL("-", 0, cudaStreamSynchronize, stream);
	CALL("-", 0, cudaFree, there);
}

typedef void *(*find_fn)(const char *symbol);

static void *library;
static CUresult (*get_proc)(const char *, void **, int, cuuint64_t,
			    CUdriverProcAddressQueryResult *);

/* As exported: the headers map cuMemAlloc to the symbol cuMemAlloc_v2, and so do we. */
static void *exported(const char *function)
{
	static const char *const second[] = {"cuMemAlloc",   "cuMemFree",    "cuMemcpyHtoD",
					     "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpyHtoDAsync",
					     "cuMemcpy2D",   "cuMemsetD32",  "cuMemAllocHost"};
	char name[64];

	snprintf(name, sizeof(name), "%s", function);
	for (size_t i = 0; i < sizeof(second) / sizeof(*second); i++)
		if (!strcmp(function, second[i]))
			snprintf(name, sizeof(name), "%s_v2", function);
	return dlsym(library, name);
}

static void *handed_out(const char *function)
{
	CUdriverProcAddressQueryResult found;
	void *pointer = NULL;

	if (get_proc(function, &pointer, CUDA_VERSION, CU_GET_PROC_ADDRESS_DEFAULT, &found))
		return NULL;
	return pointer;
}

/* The prototypes, free of the headers' renaming. */
extern CUresult alloc_of(CUdeviceptr *, size_t), free_of(CUdeviceptr), sync_of(void);
extern CUresult h2d_of(CUdeviceptr, const void *, size_t), d2h_of(void *, CUdeviceptr, size_t);
extern CUresult d2d_of(CUdeviceptr, CUdeviceptr, size_t), any_of(CUdeviceptr, CUdeviceptr, size_t);
extern CUresult h2da_of(CUdeviceptr, const void *, size_t, CUstream);
extern CUresult rect_of(const CUDA_MEMCPY2D *), set_of(CUdeviceptr, unsigned, size_t);
extern CUresult stream_of(CUstream), allochost_of(void **, size_t), freehost_of(void *);

#define DRIVER(kind, direction, bytes, name, ...)                                                  \
	note(name, direction, bytes, (int)((__typeof__(&kind##_of))find(name))(__VA_ARGS__))

static void driver(long i, find_fn find)
{
	size_t size = 64 + (size_t)(i * 37 % 1009);
	CUdeviceptr there = 0, other = 0;
	CUDA_MEMCPY2D rect;
	void *pinned = NULL;

	memset(&rect, 0, sizeof(rect));
	DRIVER(alloc, "-", 65536 + size, "cuMemAlloc", &there, 65536 + size);
	DRIVER(alloc, "-", 65536, "cuMemAlloc", &other, 65536);
	DRIVER(allochost, "-", size, "cuMemAllocHost", &pinned, size);
	DRIVER(h2d, "h2d", size, "cuMemcpyHtoD", there, host, size);
	DRIVER(d2h, "d2h", size / 2, "cuMemcpyDtoH", host, there, size / 2);
	DRIVER(d2d, "d2d", size, "cuMemcpyDtoD", other, there, size);
	DRIVER(any, "unknown", 99, "cuMemcpy", other, there, 99);
	DRIVER(h2da, "h2d", size, "cuMemcpyHtoDAsync", there, pinned, size, NULL);
	rect.srcMemoryType = CU_MEMORYTYPE_HOST;
	rect.srcHost = host;
	rect.srcPitch = 128;
	rect.dstMemoryType = CU_MEMORYTYPE_DEVICE;
	rect.dstDevice = there;
	rect.dstPitch = 64;
	rect.WidthInBytes = 60;
	rect.Height = 7;
	DRIVER(rect, "h2d", 60 * 7, "cuMemcpy2D", &rect);
	DRIVER(set, "-", 16 * 4, "cuMemsetD32", there, 5, 16);
	DRIVER(stream, "-", 0, "cuStreamSynchronize", NULL);
	DRIVER(sync, "-", 0, "cuCtxSynchronize");
	DRIVER(freehost, "-", 0, "cuMemFreeHost", pinned);
	DRIVER(free, "-", 0, "cuMemFree", other);
	DRIVER(free, "-", 0, "cuMemFree", there);
}

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 100;

	if (argc > 2 && !strcmp(argv[2], "hold")) {
		cudaFree(NULL); /* the context is made before the recorder looks */
		puts("ready");
		fflush(stdout);
		if (getchar() == EOF)
			return 1;
	} else {
		CALL("-", 0, cudaFree, NULL);
	}
	for (long i = 0; i < count; i++)
		runtime(i);
	graphs(count);
	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (library) {
		for (long i = 0; i < count; i++)
			driver(i, exported);
		get_proc = (__typeof__(get_proc))dlsym(library, "cuGetProcAddress_v2");
		for (long i = 0; get_proc && i < count; i++)
			driver(i, handed_out);
		fprintf(stderr, "exported %p, handed out %p\n", exported("cuMemcpyHtoD"),
			get_proc ? handed_out("cuMemcpyHtoD") : NULL);
	}
	for (int i = 0; truth[i].function; i++)
		printf("%s %s %d %ld %ld\n", truth[i].function, truth[i].direction, truth[i].status,
		       truth[i].count, truth[i].bytes);
	return 0;
}
