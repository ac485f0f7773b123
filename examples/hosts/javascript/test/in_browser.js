/**
 * Run the scenario in headless Chromium: node in_browser.js wasm|webgpu FOLDER [OPTIONS AS JSON].
 * It prints the result as JSON, or `{"skip": reason}` where the browser finds no adapter for WebGPU.
 */

import { writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { browser, serve } from "./browser.js";

const [provider, folder, options = "{}"] = process.argv.slice(2);
const here = dirname(fileURLToPath(import.meta.url));
const server = await serve({ root: join(here, "../../../.."), host: folder });
const tests = "/root/examples/hosts/javascript/test";
const chromium = await browser();
const page = await chromium.newPage();
page.on("console", (message) => console.error(message.text()));
await page.goto(`${server.address}${tests}/blank.html`);
const result = await page.evaluate(
  async ({ provider, options, tests }) => {
    if (provider === "webgpu" && !(await navigator.gpu?.requestAdapter())) return { skip: "no adapter for WebGPU" };
    const name = provider === "webgpu" ? "ort.webgpu.min.mjs" : "ort.wasm.min.mjs";
    const ort = await import(`${tests}/node_modules/onnxruntime-web/dist/${name}`);
    ort.env.wasm.numThreads = 1;
    ort.env.logLevel = "error";
    const { scenario } = await import(`${tests}/scenario.js`);
    const files = async (name) => new Uint8Array(await (await fetch(`/host/${name}`)).arrayBuffer());
    const { saved, end, ...others } = await scenario(ort, files, { executionProviders: [provider], ...options });
    const { saveToIndexedDB, loadFromIndexedDB, saveToOPFS, loadFromOPFS } =
      await import("/root/graphopt/hosts/javascript/index.js");
    await saveToIndexedDB("try", end);
    await saveToOPFS("try", end);
    const kept = [await loadFromIndexedDB("try"), await loadFromOPFS("try"), await loadFromOPFS("none")];
    return { ...others, end: Array.from(end), kept: kept.map((bytes) => bytes && String(bytes) === String(end)) };
  },
  { provider, options: JSON.parse(options), tests },
);
await chromium.close();
server.close();
const { end, ...others } = result;
if (end) await writeFile(join(folder, "end.safetensors"), Uint8Array.from(end));
console.log(JSON.stringify(others));
