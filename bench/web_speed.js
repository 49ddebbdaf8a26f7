// SPDX-License-Identifier: Apache-2.0
// Answers that are made up in the page, in place of a server's, and what is timed over them.
// bench/web_speed.py puts `const SCENE = …;` before this.

const random = (() => { let s = 7; return () => (s = (s * 48271) % 2147483647) / 2147483647; })();

/** As src/sonde/export/packed.py writes it. */
function packed(document) {
  const parts = [];
  let size = 0;
  const placed = (value) => {
    if (ArrayBuffer.isView(value)) {
      const kind = value instanceof Float64Array ? "f64" : value instanceof Int32Array ? "i32" : "u8";
      const at = size;
      parts.push([at, new Uint8Array(value.buffer)]);
      size += Math.ceil(value.byteLength / 8) * 8;
      return { $: [kind, at, value.length] };
    }
    if (Array.isArray(value)) return value.map(placed);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, placed(one)]));
  };
  const head = new TextEncoder().encode(JSON.stringify(placed(document)));
  const base = 8 + Math.ceil(head.length / 8) * 8;
  const bytes = new Uint8Array(base + size).fill(32, 0, base);
  new DataView(bytes.buffer).setUint32(0, head.length, true);
  new DataView(bytes.buffer).setUint32(4, 1, true);
  bytes.set(head, 8);
  for (const [at, part] of parts) bytes.set(part, base + at);
  return bytes.buffer;
}

function spans(n, lanes) {
  const c = {
    kinds: ["other", "launch", "graph_launch", "copy", "set", "sync"], left_out: 0, start: new Float64Array(n),
    end: new Float64Array(n), kind: new Uint8Array(n), name: new Int32Array(n), track: new Int32Array(n), waker: new Int32Array(n),
  };
  const at = new Float64Array(lanes);
  for (let i = 0; i < n; i++) {
    const lane = i % lanes;
    c.start[i] = at[lane] + random() * 3e5;
    c.end[i] = at[lane] = c.start[i] + random() * 5e5;
    c.kind[i] = i % 6;
    c.name[i] = (i * 7) % 500;
    c.track[i] = lane;
  }
  return [c, Math.max(...at)];
}

const ANSWERS = {
  timeline() {
    const [calls, end] = spans(SCENE.spans, SCENE.lanes);
    const none = spans(0, 1)[0];
    return packed({
      origin_ns: 1795312870e9, begin_ns: 0, end_ns: end, calls, states: none, device: none,
      names: Array.from({ length: 500 }, (_, i) => `cudaCall${i}`), causes: [], sampled: false,
      tracks: Array.from({ length: SCENE.lanes }, (_, i) => ({
        kind: "thread", label: `thread ${i}`, pid: 1, device: -1, process: "python", owner: "program",
      })),
      samples: { time: [], track: [], weight: [], name: [], left_out: 0 }, runs: null, tick_ns: 1e9,
      stalls: { device: [], start: [], end: [], cause: [] }, explanation: { verdicts: [], notes: [] },
    });
  },
  flamegraph() {
    const frames = Array.from({ length: 5000 }, (_, i) => ({ kind: "user", function: `f${i}`, binary: `lib${i % 20}`, file: "", line: 0 }));
    const stacks = [];
    // Trees of 12 levels; each stack adds about 7.5 nodes.
    for (let i = 0; i < SCENE.nodes / 7.5; i++) {
      const stack = [0];
      for (let d = 0, v = i; d < 7; d++) { stack.push(1 + d * 100 + (v % 6)); v = Math.floor(v / 6); }
      for (let d = 0; d < 5; d++) stack.push(1000 + ((i * 5 + d) % 4000));
      stacks.push({ frames: stack.reverse(), n: 1, ns: 1e6 * (1 + 9 * random()), bytes: 0 });
    }
    return JSON.stringify({ total: { rows: 1, n: 1, ns: 1, bytes: 0 }, frames, stacks });
  },
  charts() {
    const times = 1440;
    const wanted = [["hw.power", {}], ["sonde.gpu.sm.active", {}], ["sonde.gpu.tensor.active", { "sonde.gpu.precision": "any" }],
      ["sonde.gpu.dram.active", {}], ["hw.gpu.memory.usage", {}], ["hw.gpu.memory.limit", {}], ["sonde.gpu.power.limit", {}],
      ["hw.gpu.utilization", { "hw.gpu.task": "general" }]];
    for (const domain of ["sm", "memory", "graphics"]) wanted.push(["sonde.gpu.clock", { "sonde.gpu.clock.domain": domain }]);
    for (const place of ["gpu", "memory"]) wanted.push(["hw.temperature", { "hw.sensor_location": place }]);
    for (const way of ["transmit", "receive"]) for (const bus of ["pcie", "nvlink"]) wanted.push([`sonde.gpu.${bus}.throughput`, { "network.io.direction": way }]);
    for (const reason of ["power", "thermal", "sync_boost", "hw_slowdown", "reliability", "board_limit", "low_utilization", "sw_power"]) wanted.push(["sonde.gpu.throttled", { "sonde.gpu.throttle.reason": reason }]);
    const rows = 8 * wanted.length * times;
    const table = { rows, numbers: { time_ns: new Float64Array(rows), value: new Float64Array(rows), least: new Float64Array(rows), most: new Float64Array(rows) },
      texts: { node: { values: ["a"], index: new Int32Array(rows) }, series: { values: [], index: new Int32Array(rows) }, labels: { values: [], index: new Int32Array(rows) } } };
    let row = 0;
    wanted.forEach(([series, labels], number) => {
      table.texts.series.values.push(series);
      for (let gpu = 0; gpu < 8; gpu++) {
        const label = table.texts.labels.values.push(JSON.stringify({ "hw.id": `GPU-${gpu}`, ...labels })) - 1;
        for (let i = 0; i < times; i++, row++) {
          table.numbers.time_ns[row] = (1795312870 - 86400 + 60 * i) * 1e9;
          table.numbers.value[row] = table.numbers.most[row] = random();
          table.texts.series.index[row] = number;
          table.texts.labels.index[row] = label;
        }
      }
    });
    window.series = 8 * wanted.length;
    return packed(table);
  },
  nodes() {
    return JSON.stringify(Array.from({ length: SCENE.fleet }, (_, i) => ({
      node: `node-${i}`, chunks: 9, sample_rows: 9, first_ns: 1795309270e9, last_ns: 1795312870e9, size_bytes: 1e6, about: "",
    })));
  },
  devices() {
    const wanted = [["hw.gpu.utilization", { "hw.gpu.task": "general" }], ["sonde.gpu.sm.active", {}], ["hw.power", {}],
      ["hw.gpu.memory.usage", {}], ["hw.gpu.memory.limit", {}]];
    const rows = SCENE.fleet * SCENE.gpus * wanted.length;
    const table = { rows, numbers: {}, texts: {} };
    for (const name of ["mean", "least", "most", "last"]) table.numbers[name] = Float64Array.from({ length: rows }, random);
    for (const name of ["node", "series", "labels"]) table.texts[name] = { values: [], index: new Int32Array(rows) };
    table.texts.series.values = wanted.map(([series]) => series);
    let row = 0;
    for (let node = 0; node < SCENE.fleet; node++) {
      table.texts.node.values.push(`node-${node}`);
      for (let series = 0; series < wanted.length; series++) {
        for (let gpu = 0; gpu < SCENE.gpus; gpu++, row++) {
          table.texts.node.index[row] = node;
          table.texts.series.index[row] = series;
          table.texts.labels.index[row] = table.texts.labels.values.push(JSON.stringify({ "hw.id": `GPU-${node}-${gpu}`, ...wanted[series][1] })) - 1;
        }
      }
    }
    return packed(table);
  },
};
const NOTHING = { flamegraph: '{"total":{},"frames":[],"stacks":[]}', verdict: '{"verdicts":[],"notes":[]}', timeline: JSON.stringify({
  origin_ns: 0, begin_ns: 0, end_ns: 1, names: [], tracks: [], causes: [], sampled: false, runs: null, tick_ns: 1e9,
  ...Object.fromEntries(["calls", "states", "device"].map((name) => [name, { kinds: [], left_out: 0, start: [], end: [], kind: [], name: [], track: [], waker: [] }])),
  samples: { time: [], track: [], weight: [], name: [], left_out: 0 }, stalls: { device: [], start: [], end: [], cause: [] },
  explanation: { verdicts: [], notes: [] },
}) };

const made = Object.fromEntries(SCENE.answers.map((name) => [name, ANSWERS[name]()]));
window.asked = {};
/** Answers wait until they are let go: to make them is not timed. */
const gate = new Promise((open) => { window.release = () => { window.released = performance.now(); open(); }; });
window.fetch = async (url) => {
  const name = new URL(url, location).pathname.split("/").pop();
  asked[name] = true;
  await gate;
  const content = made[name] ?? NOTHING[name] ?? "[]";
  if (typeof content === "string") {
    return { ok: true, status: 200, headers: new Headers(), json: async () => JSON.parse(content) };
  }
  return { ok: true, status: 200, headers: new Headers({ "Content-Type": "application/vnd.sonde.columns" }), arrayBuffer: async () => content };
};

window.drawn = {};
const DONE = {
  flames: () => document.querySelector(".flames canvas")?.dataset.ms,
  lanes: () => document.querySelector(".lanes canvas")?.dataset.ms,
  charts: () => document.querySelectorAll(".chart canvas").length && document.querySelectorAll(".chart canvas").length === document.querySelectorAll(".chart").length,
  nodes: () => document.querySelector(".meter"),
};
const look = () => {
  for (const [which, isDone] of Object.entries(DONE)) if (!(which in drawn) && isDone()) drawn[which] = performance.now();
  requestAnimationFrame(look);
};
requestAnimationFrame(look);

/** Moves a pointer over a canvas, dragging or not: what drawing took, and how far frames were apart. */
window.moved = (which, frames, drags, done) => {
  const canvas = document.querySelector(`.${which} canvas`);
  const box = canvas.getBoundingClientRect();
  const spent = [];
  const apart = [];
  const fire = (type, x) => canvas.dispatchEvent(new PointerEvent(type, { bubbles: true, pointerId: 1, clientX: box.left + x, clientY: box.top + 60, button: 0 }));
  canvas.setPointerCapture = () => {};
  canvas.focus();
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
  let i = 0;
  let before = 0;
  fire("pointermove", 200);
  if (drags) fire("pointerdown", 200);
  const step = (now) => {
    if (before) apart.push(now - before);
    before = now;
    if (i) spent.push(Number(canvas.dataset.ms));
    if (i++ >= frames) { fire("pointermove", 200); fire("pointerup", 200); done([spent, apart]); return; }
    fire("pointermove", 200 + 3 * i);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
};

/** Milliseconds from a click on a box until it is drawn zoomed, several times. */
window.zoomed = async (which, times, done) => {
  const canvas = document.querySelector(`.${which} canvas`);
  canvas.setPointerCapture = () => {};
  const found = [];
  for (let i = 0; i < times; i++) {
    await new Promise((settled) => setTimeout(settled, 300));
    const box = canvas.getBoundingClientRect();
    const before = canvas.dataset.frames;
    const began = performance.now();
    for (const type of ["pointerdown", "pointerup"]) {
      canvas.dispatchEvent(new PointerEvent(type, { bubbles: true, pointerId: 1, clientX: box.left + 60, clientY: box.top + (i % 2 ? 10 : 90), button: 0 }));
    }
    await new Promise((drawnAgain) => {
      const wait = () => (canvas.dataset.frames === before ? requestAnimationFrame(wait) : drawnAgain());
      requestAnimationFrame(wait);
    });
    found.push(performance.now() - began);
  }
  done(found);
};
