// SPDX-License-Identifier: Apache-2.0
// Makes elements of the document out of JSX, in the place of Preact (vite.report.mjs): for components without a state. Text
// becomes text nodes; nothing becomes markup.

type Child = Node | string | number | boolean | null | undefined | readonly Child[];
type Properties = Record<string, unknown> & { children?: Child };
type Component = (properties: Properties) => Child;

export const Fragment: Component = ({ children }) => children;

export function jsx(type: string | Component, properties: Properties): Child {
  if (typeof type === "function") return type(properties);
  const made = document.createElement(type);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "children" || value === undefined || value === null) continue;
    if (typeof value === "function") made.addEventListener(name.slice(2).toLowerCase(), value as EventListener);
    else if (name === "style") Object.assign(made.style, value);
    else if (typeof value !== "boolean" || name.startsWith("aria-")) made.setAttribute(name, String(value));
    else if (value) made.setAttribute(name, "");
  }
  made.append(...nodes(properties.children));
  return made;
}

export const jsxs = jsx;

/** What stands for a child in the document; nothing for none. */
export function nodes(child: Child): (Node | string)[] {
  if (Array.isArray(child)) return child.flatMap(nodes);
  if (child instanceof Node) return [child];
  return typeof child === "string" || typeof child === "number" ? [String(child)] : [];
}
