// SPDX-License-Identifier: Apache-2.0
// A value that changes many times a second: only the components that show it are drawn again for it.

import { useEffect, useState } from "preact/hooks";

export class Live<T> {
  private readonly listeners = new Set<(value: T) => void>();

  constructor(public value: T) {}

  set(value: T): void {
    if (Object.is(value, this.value)) return;
    this.value = value;
    for (const one of this.listeners) one(value);
  }

  listen(listener: (value: T) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

export function useLive<T>(live: Live<T>): T {
  const [value, setValue] = useState(live.value);
  useEffect(() => {
    setValue(() => live.value);
    return live.listen((one) => setValue(() => one));
  }, [live]);
  return value;
}
