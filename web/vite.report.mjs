// SPDX-License-Identifier: Apache-2.0
// The renderer alone, as one script for the one-file report.
import { defineConfig } from "vite";

export default defineConfig({
  build: {
    outDir: "../src/sonde/export/built",
    emptyOutDir: true,
    target: "es2022",
    copyPublicDir: false,
    lib: { entry: "src/report.ts", formats: ["iife"], name: "Boxes", fileName: () => "boxes.js" },
  },
});
