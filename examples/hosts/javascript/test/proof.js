/** Open host folders on runtimes with faults: node proof.js node|wasm COUNT FOLDER..., which prints what is said as JSON. */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { Trainer } from "../../../../graphopt/hosts/javascript/index.js";
import { faults } from "./planted.js";

const [runtime, count, ...folders] = process.argv.slice(2);
const module = await import(runtime === "node" ? "onnxruntime-node" : "onnxruntime-web");
const ort = module.default ?? module;
ort.env.wasm.numThreads = 1;
const results = {};
for (const folder of folders)
  results[folder] = await faults(Trainer, ort, (name) => readFile(join(folder, name)), Number(count), {});
process.stdout.write(JSON.stringify(results), () => process.exit(0));
