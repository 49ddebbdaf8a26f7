// SPDX-License-Identifier: Apache-2.0
// Tokens of several tenants in one tab: which is used, and which others there are.

import { send, token } from "./api";
import type { IdentityAnswer } from "./answers";

/** The key of the tab's session storage. */
const HELD = "sonde.tokens";
/** Beyond it the token that was used longest ago is dropped. */
const MAX_HELD = 16;

/** Tokens by tenant, of this tab alone. */
export function held(): Record<string, string> {
  try {
    const found: unknown = JSON.parse(sessionStorage.getItem(HELD) ?? "{}");
    return typeof found === "object" && found !== null ? (found as Record<string, string>) : {};
  } catch {
    return {};
  }
}

/** Keep the token in use for its tenant. */
export function hold(tenant: string): void {
  const others = Object.entries(held()).filter(([name]) => name !== tenant).slice(1 - MAX_HELD);
  sessionStorage.setItem(HELD, JSON.stringify(Object.fromEntries([...others, [tenant, token.get()]])));
}

/** Use the token that is kept for a tenant. Returns whether there is one. */
export function use(tenant: string): boolean {
  const found = held()[tenant];
  if (found) token.set(found);
  return Boolean(found);
}

/** Keep a tenant's token no longer; nor use it, if it is the one in use. */
export function forget(tenant: string): void {
  const isInUse = held()[tenant] === token.get();
  sessionStorage.setItem(HELD, JSON.stringify(Object.fromEntries(Object.entries(held()).filter(([name]) => name !== tenant))));
  if (isInUse) token.set("");
}

/** Whose data the token shows; null where that is not known. Never throws. */
export async function identity(signal: AbortSignal): Promise<IdentityAnswer | null> {
  try {
    return (await (await send("/v1/identity", {}, signal)).json()) as IdentityAnswer;
  } catch {
    return null;
  }
}
