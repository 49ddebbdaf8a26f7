// SPDX-License-Identifier: Apache-2.0
// What draws stacks and the verdict, as one script and its style for the one-file report.
import { defineConfig } from "vite";

export default defineConfig({
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  resolve: { alias: { "preact/jsx-runtime": new URL("src/plain_jsx.ts", import.meta.url).pathname } },
  build: {
    outDir: "../src/sonde/export/built",
    emptyOutDir: true,
    target: "es2022",
    copyPublicDir: false,
    lib: { entry: "src/report.tsx", formats: ["iife"], name: "Boxes", fileName: () => "boxes.js", cssFileName: "verdict" },
  },
});
