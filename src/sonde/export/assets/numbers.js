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
  cpu: {
    title: "On-CPU", metrics: ["ns", "count"], events: "samples",
    hint: "Code that the CPUs ran",
  },
  blocked: {
    title: "Off-CPU: blocked", metrics: ["ns", "count"], events: "waits",
    hint: "Threads that waited for something",
  },
  runqueue: {
    title: "Off-CPU: run queue", metrics: ["ns", "count"], events: "waits",
    hint: "Threads that were ready and waited for a CPU",
  },
  device: {
    title: "Device calls", metrics: ["ns", "count", "bytes"], events: "calls",
    hint: "Calls to a device: time inside them and bytes they moved",
  },
  kernel: {
    title: "On the device", metrics: ["ns", "count"], events: "runs",
    hint: "Time on the device itself, under the code that asked for it; estimated from timed runs",
  },
  mapped: {
    title: "Memory mapped", metrics: ["bytes", "count"], events: "mappings",
    hint: "Bytes added to address spaces by mmap and brk, whatever became of them",
  },
  faulted: {
    title: "Memory touched", metrics: ["bytes", "count"], events: "page faults",
    hint: "Bytes brought in by page faults, under the code that touched them first",
  },
  held: {
    title: "Memory held", metrics: ["bytes", "count"], events: "mappings",
    hint: "Bytes mapped and not unmapped again while this was recorded",
  },
};
