// SPDX-License-Identifier: Apache-2.0
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { defineConfig } from "vite";

const outDir = "../src/sonde/server/static";

/** Writes each asset compressed beside itself: the server sends that to clients that take gzip. */
const packed = {
  name: "packed",
  closeBundle() {
    const folder = new URL(`${outDir}/assets/`, import.meta.url);
    for (const name of readdirSync(folder).filter((one) => !one.endsWith(".gz"))) {
      writeFileSync(new URL(`${name}.gz`, folder), gzipSync(readFileSync(new URL(name, folder)), { level: 9 }));
    }
  },
};

export default defineConfig({
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  build: {
    outDir,
    emptyOutDir: true,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    target: "es2022",
  },
  plugins: [packed],
});
