/** Train, and write the checkpoint and the adapter's files to FOLDER/end: node adapters.js node|wasm FOLDER; it prints their names. */

import { mkdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { Trainer } from "../../../../graphopt/hosts/javascript/index.js";
import { batchesOf } from "./scenario.js";

const [runtime, folder] = process.argv.slice(2);
const module = await import(runtime === "node" ? "onnxruntime-node" : "onnxruntime-web");
const ort = module.default ?? module;
ort.env.wasm.numThreads = 1;
const trainer = await Trainer.create(ort, folder);
await trainer.run(batchesOf(ort, await readFile(join(folder, "batches.json"))));
const found = {};
await mkdir(join(folder, "end"));
await writeFile(join(folder, "end", "state.safetensors"), await trainer.save());
for (const form of ["onnxruntime", "peft"]) {
  try {
    const files = await trainer.adapter(form);
    for (const [name, bytes] of Object.entries(files)) await writeFile(join(folder, "end", name), bytes);
    found[form] = Object.keys(files);
  } catch (error) {
    found[form] = `${error.name}: ${error.message}`;
  }
}
process.stdout.write(JSON.stringify(found), () => process.exit(0));
