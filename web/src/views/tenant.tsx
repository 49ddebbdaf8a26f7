// SPDX-License-Identifier: Apache-2.0
// Whose data is shown, and another tenant's in its place.

import { useEffect, useRef, useState } from "preact/hooks";
import type { IdentityAnswer } from "../answers";
import { token } from "../api";
import { useApp } from "../state";
import { forget, held, hold, identity, use } from "../tenants";
import { START } from "../url";

export function TenantMenu(): preact.JSX.Element | null {
  const { attempt, again, go } = useApp();
  const menu = useRef<HTMLDetailsElement>(null);
  const [known, setKnown] = useState<IdentityAnswer | null>(null);
  useEffect(() => {
    const stop = new AbortController();
    void identity(stop.signal).then((found) => {
      if (stop.signal.aborted) return;
      if (found && !found.open) hold(found.tenant);
      setKnown(found);
    });
    return () => stop.abort();
  }, [attempt]);
  if (!known || known.open) return null;
  const close = (): void => { menu.current!.open = false; };
  const show = (): void => {
    close();
    go({ ...START });
    again();
  };
  const others = Object.keys(held()).filter((name) => name !== known.tenant);
  return (
    <details class="menu tenant" ref={menu} onKeyDown={(event) => { if (event.key === "Escape") close(); }}>
      <summary aria-label={`Tenant ${known.tenant}; switch`}>{known.tenant}</summary>
      <div role="group" aria-label="Tenants">
        {others.map((name) => <button onClick={() => { if (use(name)) show(); }}>Switch to {name}</button>)}
        <button onClick={() => { token.set(""); show(); }}>Use another token</button>
        <button onClick={() => { forget(known.tenant); show(); }}>Forget this token</button>
      </div>
    </details>
  );
}
