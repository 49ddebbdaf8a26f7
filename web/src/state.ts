// SPDX-License-Identifier: Apache-2.0
// The place that the address names, the theme, and answers of the server for components.

import { createContext } from "preact";
import { useContext, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ask, AskError, type Parameters } from "./api";
import { paletteOf, type Palette } from "./draw/colours";
import { format, parse, type Place, type View } from "./url";

export interface App {
  place: Place;
  /** Go to a place; `replace`: the back button skips the one before. */
  go(change: Partial<Place>, replace?: boolean): void;
  /** The address of such a place, for links. */
  hrefOf(change: Partial<Place>): string;
  palette: Palette;
  setTheme(dark: boolean): void;
  /** How often `again` was called: all questions are then asked once more. */
  attempt: number;
  again(): void;
}

export const AppContext = createContext<App>(undefined as unknown as App);
export const useApp = (): App => useContext(AppContext);

const THEME = "sonde.theme";

export function useAppState(): App {
  const [place, setPlace] = useState(() => parse(location.search));
  const [attempt, setAttempt] = useState(0);
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(() => {
    const chosen = localStorage.getItem(THEME);
    return chosen ? chosen === "dark" : preferred.matches;
  });
  const current = useRef(place);
  current.current = place;
  useEffect(() => {
    const restored = (): void => setPlace(parse(location.search));
    const changed = (): void => {
      if (!localStorage.getItem(THEME)) setDark(preferred.matches);
    };
    addEventListener("popstate", restored);
    preferred.addEventListener("change", changed);
    return () => {
      removeEventListener("popstate", restored);
      preferred.removeEventListener("change", changed);
    };
  }, []);
  useEffect(() => {
    document.documentElement.dataset["theme"] = dark ? "dark" : "light";
  }, [dark]);
  useEffect(() => {
    const named: Partial<Record<View, string>> = {
      overview: "Overview", ranks: "Ranks", fleet: "Fleet", memory: `Memory of ${place.node}`, alerts: "Alerts", incidents: "Incidents",
      owners: "Owners", jobs: "Jobs", job: `${place.by || "job"} ${place.id}`, compare: "Compare",
    };
    const parts = [named[place.view] ?? place.node, "Sonde"].filter(Boolean);
    document.title = parts.join(" · ");
  }, [place.view, place.node, place.by, place.id]);
  const palette = useMemo(() => paletteOf(dark), [dark]);
  return {
    place, palette, attempt,
    hrefOf: (change) => `${location.pathname}${format({ ...current.current, ...change })}`,
    again: () => setAttempt((count) => count + 1),
    go(change, replace = false) {
      const next = { ...current.current, ...change };
      const address = `${location.pathname}${format(next)}`;
      current.current = next;
      if (replace) history.replaceState(null, "", address);
      else history.pushState(null, "", address);
      setPlace(next);
    },
    setTheme(next) {
      localStorage.setItem(THEME, next ? "dark" : "light");
      setDark(next);
    },
  };
}

export interface Asked<T> {
  answer: T | null;
  error: AskError | null;
  loading: boolean;
}

/** The answer to a question, asked again when its parameters change; null question: not asked. While it is asked, the
 * answer before stays; after a failure there is none. */
export function useAnswer<T>(question: string | null, parameters: Parameters): Asked<T> {
  const { attempt } = useApp();
  const [state, setState] = useState<Asked<T>>({ answer: null, error: null, loading: question !== null });
  const key = JSON.stringify([question, parameters, attempt]);
  useEffect(() => {
    if (!question) {
      setState({ answer: null, error: null, loading: false });
      return undefined;
    }
    const stop = new AbortController();
    setState((before) => ({ answer: before.answer, error: null, loading: true }));
    ask<T>(question, parameters, stop.signal).then(
      (answer) => setState({ answer, error: null, loading: false }),
      (error: unknown) => {
        if (stop.signal.aborted) return;
        const failure = error instanceof AskError ? error : new AskError(0, String(error), "load the page again");
        setState({ answer: null, error: failure, loading: false });
      },
    );
    return () => stop.abort();
  }, [key]);
  return state;
}
