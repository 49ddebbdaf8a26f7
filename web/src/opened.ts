// SPDX-License-Identifier: Apache-2.0
// A file that somebody dropped on the page: the server reads it, this tab alone holds its contents.

import { AskError, send, type Flame, type TimelineAnswer } from "./api";
import { Live } from "./live";
import { unpacked } from "./packed";

export interface Opened {
  name: string;
  timeline: TimelineAnswer;
  /** Stacks by kind (cpu, blocked, …); a trace has none. */
  flames: Record<string, Flame>;
}

export type Opening = { state: "none" } | { state: "reads"; name: string } | { state: "failed"; name: string; error: AskError } | { state: "open"; opened: Opened };

export const opening = new Live<Opening>({ state: "none" });

export async function open(file: File): Promise<void> {
  const { name } = file;
  opening.set({ state: "reads", name });
  try {
    // A type that another site's form cannot send: the server refuses all others.
    const body = new Blob([file], { type: "application/octet-stream" });
    const response = await send("/v1/open", { method: "POST", body });
    const found = unpacked(await response.arrayBuffer()) as Omit<Opened, "name">;
    opening.set({ state: "open", opened: { name, ...found } });
  } catch (error) {
    const failure = error instanceof AskError ? error : new AskError(0, "the answer cannot be read", "load the page again");
    opening.set({ state: "failed", name, error: failure });
  }
}
