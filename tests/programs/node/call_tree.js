// SPDX-License-Identifier: Apache-2.0
'use strict';
// A known call tree: 20 times down, then heavy and light in the proportion 3 to 1.
const { Worker, isMainThread, workerData } = require('worker_threads');

let sink = 0;

function spin(n) {
  let x = n | 1;
  for (let i = 0; i < n; i++) {
    x = (Math.imul(x, 1664525) + (x >>> 7)) | 0;
  }
  return x;
}

function heavy(n) {
  return spin(3 * n) ^ 1;
}

function light(n) {
  return spin(n) ^ 2;
}

function down(depth, n) {
  if (depth > 0) {
    return down(depth - 1, n) + 1;
  }
  return heavy(n) + light(n);
}

// Garbage, so that functions are moved, and V8's own code between two functions of this file.
function collect(n) {
  const values = Array.from({ length: n }, (_, i) => ({ key: (i * i) % 7 }));
  values.sort((a, b) => b.key - a.key);
  return values[0].key;
}

function work(n, collects) {
  for (;;) {
    sink = down(20, n);
    if (collects) {
      sink += collect(n >> 3);
    }
  }
}

const size = isMainThread ? Number(process.argv[2]) : workerData;
if (isMainThread) {
  const threads = Number(process.argv[3]);
  for (let i = 1; i < threads; i++) {
    new Worker(__filename, { workerData: size });
  }
  console.log('ready');
  // Workers start only while their parent's loop turns.
  setTimeout(() => work(size, threads > 1), 500);
} else {
  work(size, true);
}
