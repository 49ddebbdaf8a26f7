// SPDX-License-Identifier: Apache-2.0
// The capture, as the page carries it: base64 of gzipped JSON.

async function loadCapture(element) {
  if (!("DecompressionStream" in globalThis)) {
    throw new Error("This browser is too old to unpack the capture; any of the last few years will do.");
  }
  const text = atob(element.textContent.trim());
  element.remove();
  const packed = Uint8Array.from(text, (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const capture = JSON.parse(await new Response(stream).text());
  const tree = capture.tree;
  tree.parent = Int32Array.from(tree.parent);
  tree.function = Int32Array.from(tree.function);
  return capture;
}

function processLabel(capture, process) {
  const { name, pid } = capture.processes;
  const label = name[process];
  return label === `pid ${pid[process]}` ? label : `${label} (${pid[process]})`;
}

function threadLabel(capture, thread) {
  return `${capture.threads.name[thread]} (${capture.threads.tid[thread]})`;
}

// Bystanders: threads that slept through the recording, and kernel threads. They are rarely what one
// looks for.
function isBystander(capture, thread) {
  const { idle, process } = capture.threads;
  return idle[thread] === 1 || capture.processes.kernel[process[thread]] === 1;
}

function sourceOf(tree, fn) {
  const file = tree.file[fn];
  if (!file) return "";
  const first = tree.firstLine[fn];
  const last = tree.lastLine[fn];
  return !first ? file : first === last ? `${file}:${first}` : `${file}:${first}–${last}`;
}
