/** What a host is tried with, the same in Node and in a browser: train, cross checkpoints, evaluate, predict. */

import { Trainer } from "../../../../graphopt/hosts/javascript/index.js";

/**
 * Train on batches from a host folder, and return what Python compares.
 *
 * @param ort ONNX Runtime
 * @param files the host folder, and `batches.json`: a list of batches, each the numbers of each feed
 * @param {{ checkpoint?: Uint8Array, from?: number, save?: number, executionProviders?: any[] }} options
 *   go on from a checkpoint at batch `from`, and save one after batch `save`
 */
export async function scenario(ort, files, { checkpoint, from = 0, save = 20, ...options } = {}) {
  const feeds = batchesOf(ort, await files("batches.json"));
  const trainer = await Trainer.create(ort, files, options);
  if (checkpoint) await trainer.load(checkpoint);
  const losses = [];
  let saved;
  for (const [i, batch] of feeds.entries()) {
    if (i === save) saved = await trainer.save();
    if (i >= from) losses.push((await trainer.step(batch)).loss);
  }
  const bad = spoiled(ort, feeds[0]); // whatever it does to the state, `difference` below tells
  const refused =
    bad &&
    (await trainer.step(bad).then(
      () => "nothing",
      ({ name }) => name,
    ));
  const state = await trainer.state();
  const evaluated = (await trainer.evaluate(feeds[0])).loss;
  const { target, ...data } = feeds[0];
  const predicted = numbers((await trainer.predict(data)).y);
  const { "inference.onnx": graph, ...weights } = await trainer.trained();
  const externalData = Object.entries(weights).map(([path, data]) => ({ path, data }));
  const session = await ort.InferenceSession.create(graph, { externalData });
  const trained = numbers((await session.run(data)).y);
  const end = await trainer.save();
  await session.release();
  await trainer.dispose();

  const other = await Trainer.create(ort, files, { stepsPerCall: 8, report: ["loss"], ...options });
  if (checkpoint) await other.load(checkpoint);
  const together = (await other.run(feeds.slice(from))).map(({ loss }) => loss);
  const found = await other.state();
  await other.dispose();
  const differences = Object.entries(state).map(([name, array]) => difference(array, found[name]));
  return { losses, together, refused, difference: Math.max(...differences), evaluated, predicted, trained, saved, end };
}

/** Return the batches of a file as tensors by name. */
export function batchesOf(ort, bytes) {
  return JSON.parse(new TextDecoder().decode(bytes)).map((batch) => {
    const entries = Object.entries(batch).map(([name, { type, dims, data }]) => {
      return [name, new ort.Tensor(type, arrayOf(type, data), dims)];
    });
    return Object.fromEntries(entries);
  });
}

/** Return a batch whose numbers are NaN; nothing if its data are whole numbers. */
function spoiled(ort, { x, ...others }) {
  if (x.type !== "float32") return undefined;
  return { ...others, x: new ort.Tensor("float32", new Float32Array(x.size).fill(NaN), x.dims) };
}

function arrayOf(type, data) {
  if (type === "int64") return BigInt64Array.from(data, BigInt);
  return type === "float16" ? Uint16Array.from(data) : Float32Array.from(data, Number); // 16 bits as they are
}

function difference(a, b) {
  return a.reduce((most, x, i) => Math.max(most, Math.abs(Number(x) - Number(b[i]))), 0);
}

function numbers(tensor) {
  return Array.from(tensor.data, Number);
}
