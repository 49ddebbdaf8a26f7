// SPDX-License-Identifier: Apache-2.0
/* A stub of libnvidia-ml.so.1, for what no test may do to a real card: lose it, hang it, age it.
 *
 * It stands in for the library alone; who asks it is the real thing. What it answers is in a file
 * (answers.h). It is compiled against nvml.h, so that the compiler holds it to the real signatures. */
#include "answers.h"

#include <time.h>

nvmlReturn_t nvmlInit_v2(void)
{
	ANSWER(NULL);
	printf("a library that talks\n"); /* as some do; it must not reach our messages */
	fflush(stdout);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown(void)
{
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	char value[TEXT] = "580.159";

	ANSWER(NULL);
	look_up("driver", value);
	snprintf(version, length, "%s", value);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	ANSWER(NULL);
	*version = 13000;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	ANSWER(NULL);
	*count = (unsigned int)number_of((nvmlDevice_t)1, "devices", 1);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	*device = (nvmlDevice_t)(uintptr_t)(index + 1);
	ANSWER(*device);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
	char value[TEXT];

	ANSWER(device);
	if (text_of(device, "uuid", value) && instance_of(device) < 0)
		snprintf(uuid, length, "%s", value);
	else if (instance_of(device) >= 0)
		snprintf(uuid, length, "MIG-stub-%u-%d", device_of(device), instance_of(device));
	else
		snprintf(uuid, length, "GPU-stub-%u", device_of(device));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
	char value[TEXT] = "NVIDIA H200";

	ANSWER(device);
	text_of(device, "name", value);
	snprintf(name, length, "%s%s", value, instance_of(device) >= 0 ? " MIG 1g.18gb" : "");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	ANSWER(device);
	memset(pci, 0, sizeof(*pci));
	snprintf(pci->busId, sizeof(pci->busId), "00000000:%02X:00.0", 0x1B + device_of(device));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending)
{
	ANSWER(device);
	*now = *pending = number_of(device, "mig", 0) > 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
	ANSWER(device);
	*count = 7;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
						 nvmlDevice_t *instance)
{
	ANSWER(device);
	if (index >= (unsigned int)number_of(device, "mig", 0))
		return NVML_ERROR_NOT_FOUND;
	*instance = (nvmlDevice_t)((uintptr_t)device + MIG * (index + 1));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
	ANSWER(device);
	*id = (unsigned int)instance_of(device) + 1;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out)
{
	ANSWER(device);
	if (instance_of(device) >= 0)
		return NVML_ERROR_NOT_SUPPORTED;
	out->gpu = (unsigned int)number_of(device, "utilization", 42);
	out->memory = (unsigned int)number_of(device, "memory_busy", 7);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
	ANSWER(device);
	if (out->version != nvmlMemory_v2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	out->total = (unsigned long long)number_of(device, "total", 150754820096.0);
	out->used = (unsigned long long)number_of(device, "used", 1073741824.0);
	out->free = out->total - out->used;
	return NVML_SUCCESS;
}

NUMBER(nvmlDeviceGetPowerUsage, unsigned int, out, "power", 118500)
NUMBER(nvmlDeviceGetMemoryBusWidth, unsigned int, out, "bus_width", 6144)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned int, out, "power_limit", 700000)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, out, "throttle", 0)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, out, "energy", 123456789)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, out, "pcie_generation", 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, out, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, out, "pcie_generation_max", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, out, "pcie_width_max", 16)

nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned int *out)
{
	(void)device, (void)out;
	return NVML_ERROR_NOT_SUPPORTED; /* cooled from outside, as data-centre cards are */
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor,
				      unsigned int *out)
{
	(void)sensor;
	ANSWER(device);
	*out = (unsigned int)number_of(device, "temperature", 41);
	return NVML_SUCCESS;
}

static unsigned int clock_of(nvmlDevice_t device, nvmlClockType_t type, const char *suffix)
{
	static const char *const names[] = {"graphics", "sm", "memory", "video"};
	static const double usual[] = {1980, 1980, 3201, 1545};
	char key[TEXT];

	snprintf(key, sizeof(key), "clock_%s%s", names[type], suffix);
	return (unsigned int)number_of(device, key, usual[type]);
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *out)
{
	ANSWER(device);
	*out = clock_of(device, type, "");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *out)
{
	ANSWER(device);
	*out = clock_of(device, type, "_max");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned int *out,
					     unsigned int *period_us)
{
	ANSWER(device);
	*out = 0, *period_us = 167000;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned int *out,
					     unsigned int *period_us)
{
	return nvmlDeviceGetEncoderUtilization(device, out, period_us);
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
					 nvmlEccCounterType_t counter, unsigned long long *out)
{
	const char *key = type ? (counter ? "ecc_uncorrected" : "ecc_uncorrected_volatile") :
				 (counter ? "ecc_corrected" : "ecc_corrected_volatile");

	ANSWER(device);
	*out = (unsigned long long)number_of(device, key, 0);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type,
					     nvmlEccCounterType_t counter,
					     nvmlMemoryLocation_t where, unsigned long long *out)
{
	const char *key = where == NVML_MEMORY_LOCATION_SRAM ?
				  (type ? "sram_uncorrected" : "sram_corrected") :
				  (type ? "dram_uncorrected" : "dram_corrected");

	(void)counter;
	ANSWER(device);
	*out = (unsigned long long)number_of(device, key, 0);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link,
				      nvmlEnableState_t *state)
{
	ANSWER(device);
	*state = link >= (unsigned int)number_of(device, "nvlinks_down", 0);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	ANSWER(device);
	for (int i = 0; i < count; i++) {
		char key[TEXT];
		double value;

		snprintf(key, sizeof(key), "field_%u", values[i].fieldId);
		value = number_of(device, key, 0);
		values[i].nvmlReturn = value < 0 ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
		values[i].valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
		values[i].value.ullVal = (unsigned long long)value;
	}
	return NVML_SUCCESS;
}

/* processes=PID:BYTES:SM,PID:BYTES:SM */
static unsigned int each_process(nvmlDevice_t device, nvmlProcessInfo_t *infos,
				 nvmlProcessUtilizationSample_t *samples, unsigned int room)
{
	char list[TEXT] = "", *rest = list, *one;
	unsigned int count = 0;
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	text_of(device, "processes", list);
	while ((one = strsep(&rest, ",")) && *one) {
		unsigned int pid = 0, sm = 0;
		unsigned long long bytes = 0;

		sscanf(one, "%u:%llu:%u", &pid, &bytes, &sm);
		if (infos && count < room) {
			memset(&infos[count], 0, sizeof(*infos));
			infos[count].pid = pid;
			infos[count].usedGpuMemory = bytes;
		}
		if (samples && count < room) {
			memset(&samples[count], 0, sizeof(*samples));
			samples[count].pid = pid;
			samples[count].smUtil = sm;
			samples[count].timeStamp =
				(unsigned long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
		}
		count++;
	}
	return count;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
						     nvmlProcessInfo_t *infos)
{
	unsigned int room = *count;

	ANSWER(device);
	*count = each_process(device, infos, NULL, room);
	return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
						      nvmlProcessInfo_t *infos)
{
	(void)infos;
	ANSWER(device);
	*count = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
					     nvmlProcessUtilizationSample_t *samples,
					     unsigned int *count, unsigned long long since_us)
{
	unsigned int room = *count;

	(void)since_us;
	ANSWER(device);
	*count = each_process(device, NULL, samples, samples ? room : 0);
	if (!*count)
		return NVML_ERROR_NOT_FOUND;
	return samples ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

/* Events: the number under `xid` happens once for each new value of `xid_count`. */
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	ANSWER(NULL);
	*set = (nvmlEventSet_t)1;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	(void)set;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
				      nvmlEventSet_t set)
{
	(void)types, (void)set;
	ANSWER(device);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
	static double seen[DEVICES];

	(void)set, (void)timeout_ms;
	ANSWER(NULL);
	for (unsigned int i = 0; i < DEVICES; i++) {
		nvmlDevice_t device = (nvmlDevice_t)(uintptr_t)(i + 1);
		char key[TEXT], value[TEXT];

		snprintf(key, sizeof(key), "%u.xid_count", i);
		if (!look_up(key, value) || strtod(value, NULL) <= seen[i])
			continue;
		seen[i] += 1;
		memset(data, 0, sizeof(*data));
		data->device = device;
		data->eventType = nvmlEventTypeXidCriticalError;
		data->eventData = (unsigned long long)number_of(device, "xid", 79);
		return NVML_SUCCESS;
	}
	return NVML_ERROR_TIMEOUT;
}

/* GPM: every metric has the value of its key, gpm_2 for the second and so on, and fails with
 * gpm_2_code. With gpm_bytes_20 or gpm_bytes_21 (PCIe) a sample keeps a count, as the chip's does,
 * and the rate is that between two samples: of that many bytes, and gpm_rate_20 more a second since
 * gpm_since (CLOCK_MONOTONIC, s). It is gpm_now, where that is set. */
enum { COUNTED_FIRST = 20, COUNTED = 2 };

struct nvmlGpmSample_st {
	nvmlDevice_t device;
	double now_s;
	double bytes[COUNTED];
};

static nvmlReturn_t sample_of(nvmlDevice_t device, nvmlGpmSample_t sample)
{
	struct timespec now;
	double since_s;

	clock_gettime(CLOCK_MONOTONIC, &now);
	sample->device = device;
	sample->now_s = number_of(device, "gpm_now", now.tv_sec + 1e-9 * now.tv_nsec);
	since_s = sample->now_s - number_of(device, "gpm_since", sample->now_s);
	for (int i = 0; i < COUNTED; i++) {
		char bytes[TEXT], rate[TEXT];

		snprintf(bytes, sizeof(bytes), "gpm_bytes_%d", COUNTED_FIRST + i);
		snprintf(rate, sizeof(rate), "gpm_rate_%d", COUNTED_FIRST + i);
		sample->bytes[i] = number_of(device, bytes, -1);
		if (sample->bytes[i] >= 0)
			sample->bytes[i] += number_of(device, rate, 0) * since_s;
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
	ANSWER(device);
	support->isSupportedDevice = number_of(device, "gpm", 1) > 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
	*sample = calloc(1, sizeof(**sample));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
	free(sample);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
	ANSWER(device);
	return sample_of(device, sample);
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int instance, nvmlGpmSample_t sample)
{
	ANSWER(device);
	if (instance_of(device) >= 0)
		return NVML_ERROR_INVALID_ARGUMENT; /* it is asked of the GPU */
	return sample_of((nvmlDevice_t)((uintptr_t)device + MIG * instance), sample);
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *metrics)
{
	nvmlGpmSample_t before = metrics->sample1, now = metrics->sample2;
	nvmlDevice_t device = now->device;

	ANSWER(device);
	for (unsigned int i = 0; i < metrics->numMetrics; i++) {
		unsigned int number = metrics->metrics[i].metricId;
		unsigned int place = number - COUNTED_FIRST;
		char key[TEXT];
		double value;

		snprintf(key, sizeof(key), "gpm_%u_code", number);
		metrics->metrics[i].nvmlReturn = (nvmlReturn_t)number_of(device, key, 0);
		snprintf(key, sizeof(key), "gpm_%u", number);
		value = number_of(device, key, number);
		if (value < 0)
			metrics->metrics[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
		if (place < COUNTED && now->bytes[place] >= 0)
			value = (now->bytes[place] - before->bytes[place]) /
				(now->now_s - before->now_s) / 1048576;
		metrics->metrics[i].value = value;
	}
	return NVML_SUCCESS;
}
