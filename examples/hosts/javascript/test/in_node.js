/** Run the scenario in Node: node in_node.js node|wasm FOLDER [OPTIONS AS JSON], which prints its result as JSON. */

import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scenario } from "./scenario.js";

const [runtime, folder, options = "{}"] = process.argv.slice(2);
const ort = await import(runtime === "node" ? "onnxruntime-node" : "onnxruntime-web");
ort.env.wasm.numThreads = 1;
const { checkpoint, ...others } = JSON.parse(options);
const { saved, end, ...result } = await scenario(ort.default ?? ort, (name) => readFile(join(folder, name)), {
  ...others,
  ...(checkpoint && { checkpoint: await readFile(join(folder, checkpoint)) }),
});
if (saved) await writeFile(join(folder, "saved.safetensors"), saved);
await writeFile(join(folder, "end.safetensors"), end);
process.stdout.write(JSON.stringify(result), () => process.exit(0));
