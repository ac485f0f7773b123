/**
 * Open a host folder whose runtime computes one kind of node wrongly, and print what the package says, as JSON.
 * node proof.js node|wasm FOLDER FAULT [PROVIDERS]: FAULT is a name in FAULTS, which a shim of the session plants.
 */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { Trainer } from "../../../../graphopt/hosts/javascript/index.js";
import { planted } from "./planted.js";
import { batchesOf } from "./scenario.js";

const [runtime, folder, faults, providers] = process.argv.slice(2);
const module = await import(runtime === "node" ? "onnxruntime-node" : "onnxruntime-web");
const ort = module.default ?? module;
ort.env.wasm.numThreads = 1;
const results = {};
for (const fault of faults.split(";")) {
  const warned = [];
  console.warn = (line) => warned.push(line);
  const result = { warned };
  try {
    const shim = planted(ort, fault);
    const begun = performance.now();
    const trainer = await Trainer.create(shim, (name) => readFile(join(folder, name)), providers ? { executionProviders: providers.split(",") } : {});
    result.ms = performance.now() - begun;
    const [batch] = batchesOf(ort, await readFile(join(folder, "batches.json")));
    result.loss = (await trainer.step(batch)).loss;
    await trainer.run([batch, batch]);
    await trainer.evaluate(batch);
    result.proofs = trainer.proofs;
    await trainer.dispose();
  } catch (error) {
    result.error = `${error.name}: ${error.message}`;
  }
  results[fault] = result;
}
process.stdout.write(JSON.stringify(results), () => process.exit(0));
