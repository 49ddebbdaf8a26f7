// SPDX-License-Identifier: Apache-2.0
function leaf(n) {
  let s = 0;
  for (let i = 0; i < n; i++) s += (i * i) % 7;
  return s;
}
function map() {
  return [1, 2, 3].map((x) => leaf(2000 + x));
}
function text() {
  return JSON.stringify({ a: [..."abcdefgh"].map((x) => x.repeat(50)) }).replace(/a+/g, "b");
}
for (;;) {
  map();
  text();
}
