/**
 * Print the keys by which a browser would remember what is proven, of variations by name, and how often each file of a
 * host folder is read: node remembered.js FOLDER.
 */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import * as ort from "onnxruntime-node";
import { Trainer } from "../../../../graphopt/hosts/javascript/index.js";
import { keyOf } from "../../../../graphopt/hosts/javascript/proof.js";

const reads = {};
const trainer = await Trainer.create(ort, (name) => {
  reads[name] = (reads[name] ?? 0) + 1;
  return readFile(join(process.argv[2], name));
});
await trainer.adapter();
const proofs = { ...trainer.proofs };

globalThis.indexedDB = {};
const file = new Uint8Array([1, 2, 3]);
const env = (wasm, webgpu) => ({ versions: { common: "1.30.0" }, wasm, webgpu });
const keys = {
  plain: await keyOf({ graph: "train" }, ["wasm"], env({ numThreads: 1 }), [file]),
  again: await keyOf({ graph: "train" }, ["wasm"], env({ numThreads: 1 }), [file.slice()]),
  options: await keyOf({ graph: "train", graphOptimizationLevel: "disabled" }, ["wasm"], env({ numThreads: 1 }), [file]),
  threads: await keyOf({ graph: "train" }, ["wasm"], env({ numThreads: 2 }), [file]),
  paths: await keyOf({ graph: "train" }, ["wasm"], env({ numThreads: 1, wasmPaths: { wasm: "a.wasm" } }), [file]),
  power: await keyOf({ graph: "train" }, ["webgpu"], env({}, { powerPreference: "low-power" }), [file]),
  webgpu: await keyOf({ graph: "train" }, ["webgpu"], env({}, {}), [file]),
  files: await keyOf({ graph: "train" }, ["wasm"], env({ numThreads: 1 }), [new Uint8Array([1, 2, 4])]),
  device: await keyOf({ graph: "train" }, [{ name: "webgpu", device: {} }], env({}), [file]),
  webnn: await keyOf({ graph: "train" }, ["webnn"], env({}), [file]),
};
process.stdout.write(JSON.stringify({ reads, proofs, keys }), () => process.exit(0));
