/** Make each mistake once, and print what the error says: node errors.js FOLDER OTHER_FOLDER SEQUENCES_FOLDER STEP_FILE */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import * as ort from "onnxruntime-node";
import { GraphoptError, Trainer } from "../../../../graphopt/hosts/javascript/index.js";

const [folder, otherFolder, sequencesFolder, stepFile] = process.argv.slice(2);
const files = (name) => readFile(join(folder, name));
const otherFiles = (name) => readFile(join(otherFolder, name));
const host = JSON.parse(await files("host.json"));
const half = { ...host, feeds: [{ ...host.feeds[0], type: "bfloat16" }, host.feeds[1]] };
const withState = (changed) => ({ ...host, state: [{ ...host.state[0], ...changed }, ...host.state.slice(1)] });
const bytesOf = (object) => new TextEncoder().encode(JSON.stringify(object));
const instead = (replaced) => async (name) => replaced[name] ?? files(name);

const trainer = await Trainer.create(ort, files);
const other = await Trainer.create(ort, otherFiles);
const sequences = await Trainer.create(ort, sequencesFolder);
const x = Float32Array.from({ length: 16 }, (_, i) => i / 8);
const target = BigInt64Array.of(1n, 3n);
const before = await trainer.save();
const renamed = new TextDecoder("latin1").decode(before).replace("layers.0.bias", "layers.9.bias");
const placed = new TextDecoder("latin1").decode(before).replace(/"data_offsets":\[0,/, '"data_offsets":[9,');
const shaped = new TextDecoder("latin1").decode(before).replace("[8,16]", "[16,8]");

const closed = await Trainer.create(ort, files);
await closed.dispose();
const named = (replaced) => Trainer.create(ort, instead(replaced));
const block = { state: host.state[0].name, offset: 0, shape: [4], strides: [1], first: 0, state_strides: [1], factor: 1 };
const withBlock = async (changed) => {
  const adapters = { onnxruntime: { "state.safetensors": [{ ...block, ...changed }] } };
  return (await named({ "host.json": bytesOf({ ...host, adapters }) })).adapter();
};
const inTurn = async (work) => {
  const good = trainer.step({ x, target });
  const results = await Promise.allSettled([work(), good]); // a mistake beside a step that is under way
  await trainer.load(before);
  if (results[1].status !== "fulfilled") throw new Error("the good step failed, too");
  if (results[0].status === "rejected") throw results[0].reason;
};

const MISTAKES = {
  "no runtime": () => Trainer.create(undefined, files),
  "the package's name": () => Trainer.create("onnxruntime-node", files),
  "another package": () => Trainer.create({ Session: 1 }, files),
  "a runtime that is not awaited": () => Trainer.create(import("onnxruntime-node"), files),
  "no folder": () => Trainer.create(ort),
  "a number for a folder": () => Trainer.create(ort, 7),
  "a folder that is not there": () => Trainer.create(ort, join(folder, "nowhere")),
  "a file for a folder": () => Trainer.create(ort, join(folder, "host.json")),
  "an address that is not there": () => Trainer.create(ort, "http://127.0.0.1:9/host"),
  "a folder of another kind": () => Trainer.create(ort, new URL(`file://${join(folder, "..")}`)),
  "a missing file": () => Trainer.create(ort, { "host.json": bytesOf(host) }),
  "text for bytes": () => Trainer.create(ort, { "host.json": JSON.stringify(host) }),
  "broken JSON": () => named({ "host.json": bytesOf(host).slice(0, 99) }),
  "a page for JSON": () => named({ "host.json": new TextEncoder().encode("<!doctype html>") }),
  "other JSON": () => named({ "host.json": bytesOf([1]) }),
  "null for JSON": () => named({ "host.json": bytesOf(null) }),
  "another version": () => named({ "host.json": bytesOf({ ...host, version: 2 }) }),
  "a damaged state": () => named({ "state.safetensors": new Uint8Array(3) }),
  "no files in JSON": () => named({ "host.json": bytesOf({ ...host, files: undefined }) }),
  "a state of another size": () => named({ "host.json": bytesOf(withState({ shape: [4] })) }),
  "a state of another type": () => named({ "host.json": bytesOf(withState({ type: "int32" })) }),
  "an adapter of a graph without": () => trainer.adapter("peft"),
  "a block of no state": () => withBlock({ state: "nothing" }),
  "a block beyond its state": () => withBlock({ state_strides: [999] }),
  "a block beyond its file": () => withBlock({ offset: 1e9 }),
  "a block that repeats": () => withBlock({ shape: [1e9], strides: [0], state_strides: [0] }),
  "a block without sizes": () => withBlock({ shape: [-1, -1], strides: [1, 1], state_strides: [1, 1] }),
  "a state elsewhere": () => named({ "host.json": bytesOf(withState({ offset: 8 })) }),
  "a state without sizes": () => named({ "host.json": bytesOf(withState({ shape: null })) }),
  "a place that is none": () => named({ "state.safetensors": Buffer.from(placed, "latin1") }),
  "a type of no array": async () => (await named({ "host.json": bytesOf(half) })).step({ x, target }),
  "a graph of state with defaults": async () => named({ "train.onnx": await readFile(stepFile) }),
  "a file that is no graph": () => named({ "train.onnx": new Uint8Array(9) }),
  "options that are no object": () => Trainer.create(ort, files, ["webgpu"]),
  "no step per call": () => Trainer.create(ort, files, { stepsPerCall: 0 }),
  "text for providers": () => Trainer.create(ort, files, { executionProviders: "cpu" }),
  "an unknown report": () => Trainer.create(ort, files, { report: ["accuracy"] }),
  "text for reports": () => Trainer.create(ort, files, { report: "loss" }),
  "an unknown answer": () => Trainer.create(ort, files, { onNonfinite: "warn" }),
  "no feeds": () => trainer.step(),
  "an array for feeds": () => trainer.step([x, target]),
  "two arguments for feeds": () => trainer.step(x, target),
  "feeds that are not awaited": () => trainer.step(Promise.resolve({ x, target })),
  "one batch for batches": () => trainer.run({ x, target }),
  "no batches": () => trainer.run(),
  "a number for a batch": () => trainer.run([{ x, target }, 3]),
  "an unknown feed": () => trainer.step({ x, target, y: x }),
  "a rate among feeds": () => trainer.step({ x, target, base_learning_rate: 0.1 }),
  "a missing feed": () => trainer.step({ x }),
  "an empty feed": () => trainer.step({ x, target: null }),
  "a number for a feed": () => trainer.step({ x, target: 3 }),
  "text for a feed": () => trainer.step({ x, target: "12" }),
  "a feed that is not awaited": () => trainer.step({ x: Promise.resolve(x), target }),
  "a buffer for a feed": () => trainer.step({ x: x.buffer, target }),
  "a graph that the folder lacks": async () => {
    const { predict, ...graphs } = host.graphs;
    await (await named({ "host.json": bytesOf({ ...host, graphs }) })).predict({ x });
  },
  "class numbers with a fraction": () => trainer.step({ x, target: Float32Array.of(1, 2.5) }),
  "class numbers that are NaN": () => trainer.step({ x, target: [1, NaN] }),
  "class numbers in text": () => trainer.step({ x, target: [1, "2"] }),
  "an empty place": () => trainer.step({ x, target: [1, undefined] }),
  "a tensor of another type": () => trainer.step({ x, target: new ort.Tensor("int32", [1, 2], [2]) }),
  "a broken row": () => trainer.step({ x: x.subarray(1), target }),
  "rows of two lengths": () => trainer.step({ x: [[1, 2, 3, 4, 5, 6, 7, 8], [1]], target }),
  "rows that are too long": () => trainer.step({ x: [[...x.subarray(0, 9)]], target: [1] }),
  "another shape": () => trainer.step({ x: new ort.Tensor("float32", x, [4, 4]), target }),
  "no rows": () => trainer.step({ x: new Float32Array(0), target: [] }),
  "sizes that differ": () => trainer.run([{ x, target: [1, 2, 3] }]),
  "a wrong label": () => trainer.step({ x, target: [1, 4] }),
  "two open sizes": () => sequences.step({ x: new BigInt64Array(12), target: new BigInt64Array(12) }),
  "a rate that is no object": () => trainer.set(0.1),
  "an unknown hyperparameter": () => trainer.set({ rate: 0.1 }),
  "a hyperparameter that is no number": () => trainer.set({ base_learning_rate: NaN }),
  "a rate in text": () => trainer.set({ base_learning_rate: "0.1" }),
  "no rate": () => trainer.set({ base_learning_rate: undefined }),
  "a rate below zero": () => trainer.set({ base_learning_rate: -0.1 }),
  "a rate that float32 has not": () => trainer.set({ base_learning_rate: 1e39 }),
  "two rates": () => trainer.set({ base_learning_rate: new Float32Array(2) }),
  "no checkpoint": () => trainer.load(new Uint8Array(5)),
  "no bytes": () => trainer.load("state"),
  "bytes that are not awaited": () => trainer.load(trainer.save()),
  "a checkpoint of another graph": async () => trainer.load(await other.save()),
  "a checkpoint of other names": () => trainer.load(Buffer.from(renamed, "latin1")),
  "a checkpoint of other shapes": () => trainer.load(Buffer.from(shaped, "latin1")),
  "a checkpoint that is cut": () => trainer.load(before.slice(0, -4)),
  "a step after dispose": () => closed.step({ x, target }),
  "a checkpoint after dispose": () => closed.save(),
  "a mistake beside a step": () => inTurn(() => trainer.step({ x, target: [1, 9] })),
  "a bad batch beside a step": () => inTurn(() => trainer.step({ x: x.map(() => NaN), target })),
};

// What looks like a mistake and is none: the same step in other words. None may change a loss.
const ALIKE = {
  "whole numbers in any array": [[1, 3], Int32Array.of(1, 3), Uint8Array.of(1, 3), Float32Array.of(1, 3), [1n, 3n]].map(
    (target) => ({ x, target }),
  ),
  "numbers in any array": [Array.from(x), Float64Array.from(x), [[...x.subarray(0, 8)], [...x.subarray(8)]]].map(
    (x) => ({
      x,
      target,
    }),
  ),
  "a tensor": [{ x: new ort.Tensor("float32", x, [2, 8]), target: new ort.Tensor("int64", [1, 3], [2]) }],
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
const { loss } = await trainer.step({ x, target });
for (const [name, alike] of Object.entries(ALIKE)) {
  for (const feeds of alike) {
    await trainer.load(before);
    const same = (await trainer.step(feeds)).loss;
    found[name] = same === loss && found[name] !== "another loss" ? "the same loss" : "another loss";
  }
}
const { check, ...ofBefore } = host; // a folder that an earlier graphopt wrote
const old = await named({ "host.json": bytesOf(ofBefore) });
const refused = await old.step({ x: x.map(() => NaN), target }).catch(({ name }) => name);
found["an older folder"] =
  refused === "NonFiniteLoss" && (await old.step({ x, target })).loss === loss ? "works" : "fails";
for (const rate of [0.5, [0.5], Float32Array.of(0.5), new ort.Tensor("float32", [0.5], [1])])
  trainer.set({ base_learning_rate: rate });
await trainer.load(before);
found["the state afterwards"] = Buffer.compare(before, await trainer.save()) ? "changed" : "as it was";
process.stdout.write(JSON.stringify(found), () => process.exit(0));
