// SPDX-License-Identifier: Apache-2.0
// What a process is called: what an interpreter runs (train.py rank 3), else the kernel's name of it.

export function programOf(one: { command: string | null; comm: string | null }): string {
  return one.command || one.comm || "unknown";
}
