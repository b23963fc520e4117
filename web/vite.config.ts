/** Builds the page into one file, gradtrace/report/template.html, that Python fills with data. */
import { createHash } from "node:crypto";
import type { Plugin } from "vite";
import { viteSingleFile } from "vite-plugin-singlefile";
import { defineConfig } from "vitest/config";

/**
 * The only file of the bundle is index.html; the wheel knows it as template.html. Its policy names
 * its one script by hash, so that no other runs, whatever a module's name holds.
 */
const template: Plugin = {
  name: "template",
  enforce: "post",
  generateBundle: {
    order: "post", // after all is in one file
    handler(_, bundle) {
      const page = bundle["index.html"];
      if (page?.type !== "asset") throw new Error("index.html is not in the bundle");
      page.fileName = "template.html";
      const text = String(page.source).replace('<script type="module" crossorigin>', '<script type="module">');
      const scripts = [...text.matchAll(/<script type="module">([^]*?)<\/script>/g)];
      if (scripts.length !== 1) throw new Error(`${scripts.length} scripts in place of one`);
      const hash = createHash("sha256").update(scripts[0]![1]!).digest("base64");
      page.source = text.replace("'unsafe-script'", `'sha256-${hash}'`);
      if (page.source === text) throw new Error("the page has no policy");
      for (const mark of ["<!--gradtrace-title-->", "<!--gradtrace-data-->"])
        if (text.split(mark).length !== 2) throw new Error(`${mark} is not there once`);
    },
  },
};

export default defineConfig({
  base: "./",
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" }, // see index.html
  plugins: [viteSingleFile({ removeViteModuleLoader: true }), template],
  build: {
    outDir: "../gradtrace/report",
    emptyOutDir: false, // Python's files are there too
    target: "es2022",
    modulePreload: false,
    reportCompressedSize: false,
  },
  worker: { format: "iife" },
  test: { include: ["test/**/*.test.{ts,tsx}"], testTimeout: 120_000 }, // machines may be busy
});
