/** Make each mistake once, and print what the error says: node errors.js FOLDER OTHER_FOLDER STEP_FILE */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import * as ort from "onnxruntime-node";
import { GraphoptError, Trainer } from "../index.js";

const [folder, otherFolder, stepFile] = process.argv.slice(2);
const files = (name) => readFile(join(folder, name));
const otherFiles = (name) => readFile(join(otherFolder, name));
const host = JSON.parse(await files("host.json"));
const half = { ...host, feeds: [{ ...host.feeds[0], type: "bfloat16" }, host.feeds[1]] };
const bytesOf = (object) => new TextEncoder().encode(JSON.stringify(object));
const instead = (replaced) => async (name) => replaced[name] ?? files(name);

const trainer = await Trainer.create(ort, files);
const other = await Trainer.create(ort, otherFiles);
const x = Float32Array.from({ length: 16 }, (_, i) => i / 8);
const target = BigInt64Array.of(1n, 3n);
const before = await trainer.save();
const renamed = new TextDecoder("latin1").decode(before).replace("layers.0.bias", "layers.9.bias");
const shaped = new TextDecoder("latin1").decode(before).replace("[8,16]", "[16,8]");

const MISTAKES = {
  "a missing file": () => Trainer.create(ort, { "host.json": bytesOf(host) }),
  "another version": () => Trainer.create(ort, instead({ "host.json": bytesOf({ ...host, version: 2 }) })),
  "a type of no array": async () =>
    (await Trainer.create(ort, instead({ "host.json": bytesOf(half) }))).step({ x, target }),
  "a graph of state with defaults": async () =>
    Trainer.create(ort, instead({ "train.onnx": await readFile(stepFile) })),
  "a file that is no graph": () => Trainer.create(ort, instead({ "train.onnx": new Uint8Array(9) })),
  "an unknown feed": () => trainer.step({ x, target, y: x }),
  "a missing feed": () => trainer.step({ x }),
  "a graph that the folder lacks": async () => {
    const { predict, ...graphs } = host.graphs;
    await (await Trainer.create(ort, instead({ "host.json": bytesOf({ ...host, graphs }) }))).predict({ x });
  },
  "another type": () => trainer.step({ x, target: Int32Array.of(1, 2) }),
  "a tensor of another type": () => trainer.step({ x, target: new ort.Tensor("int32", [1, 2], [2]) }),
  "a broken row": () => trainer.step({ x: x.subarray(1), target }),
  "another shape": () => trainer.step({ x: new ort.Tensor("float32", x, [4, 4]), target }),
  "sizes that differ": () => trainer.run([{ x, target: [1, 2, 3] }]),
  "a wrong label": () => trainer.step({ x, target: [1, 4] }),
  "an unknown hyperparameter": () => trainer.set({ rate: 0.1 }),
  "a hyperparameter that is no number": () => trainer.set({ base_learning_rate: NaN }),
  "no checkpoint": () => trainer.load(new Uint8Array(5)),
  "no bytes": () => trainer.load("state"),
  "a checkpoint of another graph": async () => trainer.load(await other.save()),
  "a checkpoint of other names": () => trainer.load(Buffer.from(renamed, "latin1")),
  "a checkpoint of other shapes": () => trainer.load(Buffer.from(shaped, "latin1")),
  "a checkpoint that is cut": () => trainer.load(before.slice(0, -4)),
};

const found = {};
for (const [name, mistake] of Object.entries(MISTAKES)) {
  try {
    await mistake();
    found[name] = "nothing";
  } catch (error) {
    found[name] = error instanceof GraphoptError ? error.message : String(error);
  }
}
found["the state afterwards"] = Buffer.compare(before, await trainer.save()) ? "changed" : "as it was";
process.stdout.write(JSON.stringify(found), () => process.exit(0));
