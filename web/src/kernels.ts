// SPDX-License-Identifier: Apache-2.0
// Kernels by name: short names, sums, and a table of them for other programs.

import type { KernelRow } from "./api";

/** Words among the template arguments of a kernel of PyTorch that show what it computes. */
const FUNCTOR = /\w*(?:[Ff]unctor\w*|_kernel_cuda\w*|launch_\w+)/;
/** Kernels of PyTorch that run what they are given. */
const GENERAL = /^(vectorized_elementwise|unrolled_elementwise|elementwise|reduce|multi_tensor_apply|index_elementwise)_?kernel/;
/** Words that stand before a name. */
const BEFORE = /^(?:void|__global__|static|inline)\s+/;

/** A text without what stands between brackets of a kind, however deep; a bracket that is not closed ends it. */
function outside(text: string, open: string, close: string): string {
  let depth = 0;
  let found = "";
  for (const one of text) {
    if (one === open) depth++;
    else if (one === close) depth = Math.max(0, depth - 1);
    else if (!depth) found += one;
  }
  return found;
}

/** The name of a function without namespaces, template arguments and parameters, and what it was made for where that
 * distinguishes it further: 'reduce_kernel sum_functor'. The name as it is where nothing is left. */
export function shortKernel(name: string): string {
  const plain = name.trim().replaceAll("(anonymous namespace)::", "").replace(BEFORE, "");
  const bare = outside(outside(plain, "<", ">").replaceAll("operator()", "operator"), "(", ")").trim().split(/\s/)[0] ?? "";
  const last = bare.split("::").at(-1);
  if (!last) return name;
  const functor = GENERAL.test(last) ? FUNCTOR.exec(plain.slice(plain.indexOf(last) + last.length))?.[0] : undefined;
  const operation = /std::(plus|minus|multiplies|divides)\b/.exec(plain)?.[1];
  if (functor) return [last, functor, operation].filter(Boolean).join(" ");
  // Libraries of templates name a kernel by its one argument.
  const argument = /^Kernel2?$/.test(last) ? /<([\w:]+)/.exec(plain)?.[1] : undefined;
  return argument ? argument.slice(argument.lastIndexOf(":") + 1) : last;
}

/** Rows of which the name, the short name or the kind has a text in it. */
export function matching(rows: readonly KernelRow[], search: string): KernelRow[] {
  const text = search.trim().toLowerCase();
  return rows.filter((row) => !text || [row.name, shortKernel(row.name), row.kind].some((one) => one.toLowerCase().includes(text)));
}

/** As comma-separated values; a name is between quotes, and no formula for who opens it in a spreadsheet. */
export function kernelsCsv(rows: readonly KernelRow[]): string {
  const quoted = (text: string): string => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  const lines = rows.map((row) => [quoted(row.name || row.kind), quoted(row.kind), row.ns, row.runs, row.mean_ns, row.most_ns].join(","));
  return `${["name,kind,gpu_time_ns,runs,mean_ns,longest_ns", ...lines].join("\n")}\n`;
}
