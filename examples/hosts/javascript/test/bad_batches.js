/** Train on batches among which are bad ones: node bad_batches.js node|wasm FOLDER, which prints the results as JSON. */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { NonFiniteLoss, Trainer } from "../../../../graphopt/hosts/javascript/index.js";
import { batchesOf } from "./scenario.js";

const [runtime, folder] = process.argv.slice(2);
const module = await import(runtime === "node" ? "onnxruntime-node" : "onnxruntime-web");
const ort = module.default ?? module;
ort.env.wasm.numThreads = 1;
const batches = batchesOf(ort, await readFile(join(folder, "batches.json")));
const { bad, rates = {} } = JSON.parse(await readFile(join(folder, "bad.json"))); // places of bad batches, and their rates
const hyperparameters = JSON.parse(await readFile(join(folder, "host.json"))).hyperparameters;
const usual = Object.fromEntries(hyperparameters.map(({ name, default: value }) => [name, value]));

/** Train with a trainer, and return its losses, what it refuses, and the state at the end. */
async function trained(train, options) {
  const trainer = await Trainer.create(ort, folder, { report: ["loss"], ...options });
  const refused = [];
  const losses = await train(trainer, (error) => {
    if (!(error instanceof NonFiniteLoss)) throw error;
    refused.push(error.message);
  });
  const state = Buffer.from(await trainer.save()).toString("base64");
  await trainer.dispose();
  return { losses, refused, state };
}

async function alone(trainer, refuse) {
  const losses = [];
  for (const [i, batch] of batches.entries()) {
    if (i in rates) trainer.set(Object.fromEntries(Object.keys(usual).map((name) => [name, rates[i]])));
    try {
      losses.push((await trainer.step(batch)).loss);
    } catch (error) {
      refuse(error);
    }
    trainer.set(usual);
  }
  return losses;
}

async function together(trainer, refuse) {
  const losses = [];
  for (let rest = batches; rest.length;) {
    try {
      losses.push(...(await trainer.run(rest)).map(({ loss }) => loss));
      break;
    } catch (error) {
      refuse(error);
      losses.push(...error.done.map(({ loss }) => loss));
      rest = rest.slice(error.done.length + 1);
    }
  }
  return losses;
}

const good = async (trainer) => (await trainer.run(batches.filter((_, i) => !bad.includes(i)))).map(({ loss }) => loss);
const skipped = async (trainer) => (await trainer.run(batches)).map(({ loss }) => loss);
const found = { good: await trained(good, { stepsPerCall: 1 }), alone: await trained(alone) };
if (!Object.keys(rates).length) {
  found.together = await trained(together, { stepsPerCall: 4 });
  found.skipped = await trained(skipped, { stepsPerCall: 4, onNonfinite: "skip" });
  found.skipped.losses = found.skipped.losses.filter((_, i) => !bad.includes(i));
}
process.stdout.write(JSON.stringify(found), () => process.exit(0));
