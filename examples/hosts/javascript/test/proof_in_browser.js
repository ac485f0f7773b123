/**
 * Open host folders in headless Chromium on runtimes with faults, WebGPU's first: node proof_in_browser.js wasm|webgpu
 * COUNT FOLDER... It prints what is said as JSON, or `{"skip": reason}`.
 */

import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { browser, serve } from "./browser.js";

const [provider, count, ...folders] = process.argv.slice(2);
const here = dirname(fileURLToPath(import.meta.url));
const hosts = Object.fromEntries(folders.map((folder, i) => [`host${i}`, folder]));
const server = await serve({ root: join(here, "../../../.."), ...hosts });
const tests = "/root/examples/hosts/javascript/test";
const chromium = await browser();
const page = await chromium.newPage();
page.on("console", (message) => console.error(message.text()));
await page.goto(`${server.address}${tests}/blank.html`);
const result = await page.evaluate(
  async ({ provider, count, folders, tests }) => {
    if (provider === "webgpu" && !(await navigator.gpu?.requestAdapter())) return { skip: "no adapter for WebGPU" };
    const ort = await import(`${tests}/node_modules/onnxruntime-web/dist/${provider === "webgpu" ? "ort.webgpu" : "ort.wasm"}.min.mjs`);
    ort.env.wasm.numThreads = 1;
    ort.env.logLevel = "error";
    const { Trainer } = await import("/root/graphopt/hosts/javascript/index.js");
    const { faults } = await import(`${tests}/planted.js`);
    const results = {};
    for (const [i, folder] of folders.entries()) {
      const files = async (name) => new Uint8Array(await (await fetch(`/host${i}/${name}`)).arrayBuffer());
      const options = { executionProviders: [provider] };
      results[folder] = await faults(Trainer, ort, files, count, options, provider);
      results[folder].push(...(await faults(Trainer, ort, files, 0, options, provider))); // once more: remembered
    }
    return results;
  },
  { provider, count: Number(count), folders, tests },
);
await chromium.close();
server.close();
console.log(JSON.stringify(result));
