/** Builds the page into one file, gradtrace/report/template.html, that Python fills with data. */
import { defineConfig } from "vitest/config";
import type { Plugin } from "vite";
import { viteSingleFile } from "vite-plugin-singlefile";

/** The only file of the bundle is index.html; the wheel knows it as template.html. */
const renamed: Plugin = {
  name: "template",
  enforce: "post",
  generateBundle(_, bundle) {
    const page = bundle["index.html"];
    if (page) page.fileName = "template.html";
  },
};

export default defineConfig({
  base: "./",
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  plugins: [viteSingleFile({ removeViteModuleLoader: true }), renamed],
  build: {
    outDir: "../gradtrace/report",
    emptyOutDir: false, // Python's files are there too
    target: "es2022",
    modulePreload: false,
    reportCompressedSize: false,
  },
  worker: { format: "iife" },
  test: { include: ["test/**/*.test.{ts,tsx}"] },
});
