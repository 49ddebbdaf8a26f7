// SPDX-License-Identifier: Apache-2.0
// Numbers as people read them.

function threeDigits(value) {
  return value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : grouped(value);
}

function grouped(value) {
  return Math.round(value).toLocaleString("en-US");
}

function duration(ns) {
  if (ns >= 600e9) return `${grouped(ns / 60e9)} min`;
  for (const [limit, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]) {
    if (ns >= limit * 0.9995) return `${threeDigits(ns / limit)} ${unit}`;
  }
  return ns ? `${Math.round(ns)} ns` : "0";
}

function byteSize(bytes) {
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= limit * 0.9995) return `${threeDigits(bytes / limit)} ${unit}`;
  }
  return bytes ? `${Math.round(bytes)} B` : "0";
}

function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return share >= 99.95 || share === 0 ? `${share.toFixed(0)} %`
    : share >= 0.095 ? `${share.toFixed(1)} %` : share >= 0.01 ? `${share.toFixed(2)} %` : "< 0.01 %";
}

const METRICS = {
  ns: { title: "time", show: duration },
  count: { title: "count", show: grouped },
  bytes: { title: "bytes", show: byteSize },
};

const KINDS = {
  "on-cpu": {
    title: "On-CPU", metrics: ["ns", "count"], events: "samples",
    hint: "Code that ran on CPUs",
  },
  "off-cpu": {
    title: "Off-CPU: blocked", metrics: ["ns", "count"], events: "waits",
    hint: "Threads that were blocked: in locks, I/O, sleeps",
  },
  "run-queue": {
    title: "Off-CPU: run queue", metrics: ["ns", "count"], events: "waits",
    hint: "Runnable threads that waited for a CPU",
  },
  "gpu-calls": {
    title: "GPU API calls", metrics: ["ns", "count", "bytes"], events: "calls",
    hint: "Calls of a GPU API (CUDA, OpenCL): host time inside them and bytes they moved",
  },
  "gpu-time": {
    title: "GPU time", metrics: ["ns", "count"], events: "runs",
    hint: "Time on the GPU, under the host code that launched the work; estimated from timed runs",
  },
  "memory-mapped": {
    title: "Memory mapped", metrics: ["bytes", "count"], events: "mappings",
    hint: "Bytes added to address spaces by mmap and brk, whether or not they were unmapped later",
  },
  "memory-faulted": {
    title: "Memory page-faulted", metrics: ["bytes", "count"], events: "page faults",
    hint: "Bytes brought in by page faults, under the code that touched them first",
  },
  "memory-held": {
    title: "Memory held", metrics: ["bytes", "count"], events: "mappings",
    hint: "Bytes mapped and not unmapped by the end of the recording",
  },
};
