/** Compare what a device computes of a batch with the numbers in a host folder, and remember that they agree. */

import { GraphoptError } from "./errors.js";
import { bytesOf, safetensors } from "./files.js";
import { loadFromIndexedDB, saveToIndexedDB } from "./storage.js";
import { numbersOf, sizeOf, tensorOf } from "./tensors.js";

const COLUMNS = 4; // of a row: how much the sums of an output may differ, and its sums
const MOST = 2 ** 26; // numbers of a feed

/** Return sums of numbers with random signs, as graphopt/hosts/proof.py computes them. */
function sums(numbers, start) {
  let [a, b, c] = [0, 0, 0];
  for (let i = 0; i < numbers.length; i++) {
    const x = Number(numbers[i]) - (start ? Number(start[i]) : 0);
    let h = Math.imul(i + 1, 0x9e3779b1);
    h = Math.imul(h ^ (h >>> 15), 0x85ebca6b);
    h ^= h >>> 13;
    a += h & 1 ? -x : x;
    b += h & 2 ? -x : x;
    c += h & 4 ? -x : x;
  }
  return [a, b, c];
}

/** Return the part of a file that has a name, as bytes of their own. */
function part({ entries, numbers }, name) {
  const { data_offsets: at, dtype } = Object.hasOwn(entries, name) ? entries[name] : {};
  const isWhole = Array.isArray(at) && at.length === 2 && at.every((n) => Number.isSafeInteger(n) && n >= 0);
  if (!isWhole || at[0] > at[1] || at[1] > numbers.length) throw new GraphoptError(`proof: expected '${name}', found none`);
  return { bytes: numbers.slice(...at).buffer, dtype };
}

/** Return the rows of a table by the names of outputs. */
function rowsOf(file, name, outputs) {
  const { bytes } = part(file, name);
  if (bytes.byteLength !== 8 * COLUMNS * outputs.length)
    throw new GraphoptError(`proof: expected ${outputs.length} rows of '${name}', found ${bytes.byteLength} bytes`);
  const numbers = new Float64Array(bytes);
  return outputs.map((output, i) => [output, ...numbers.subarray(COLUMNS * i, COLUMNS * (i + 1))]);
}

/** Return the batch of a proof as tensors. */
export function batchOf(ort, bytes, feeds, arrayClass) {
  const [file, sizes] = [safetensors(bytes), {}];
  return Object.fromEntries(
    feeds.map((feed) => {
      const dims = Array.from(new BigInt64Array(part(file, `shape.${feed.name}`).bytes), Number);
      const Numbers = arrayClass(ort, feed.type);
      const [own, size] = [new Numbers(part(file, `feed.${feed.name}`).bytes), sizeOf(dims)];
      if (!dims.every((n) => n > 0) || !(size <= MOST) || !own.length)
        throw new GraphoptError(`proof: feed '${feed.name}': expected numbers of some shape, found [${dims}]`);
      const data = Numbers.from({ length: size }, (_, i) => own[i % own.length]);
      return [feed.name, tensorOf(ort, feed, new ort.Tensor(feed.type, data, dims), sizes)];
    }),
  );
}

/** Return the first output whose sums differ from its row, and in which way; undefined if none does. */
async function first(rows, found, before) {
  for (const [name, allowed, ...expected] of rows) {
    const { type, dims } = found[name];
    const numbers = (data) => (type === "float16" ? numbersOf({ type, data }) : data);
    const start = before[name] && numbers(before[name].data);
    const data = numbers(await found[name].getData());
    if (start && start.length !== data.length) return `${name}: expected ${start.length} numbers, found [${dims}]`;
    const other = sums(data, start);
    const at = other.findIndex((sum, k) => !(Math.abs(sum - expected[k]) <= allowed));
    if (at >= 0 && allowed !== Infinity) return `${name}: expected the sum ${expected[at].toPrecision(6)} of the proof, found ${other[at].toPrecision(6)}`;
  }
}

/**
 * Run a graph on a proof, and return a line about what differs, or nothing.
 *
 * @param given the batch, state and hyperparameters as tensors by name
 * @param before the state by the name of the output that replaces it
 */
export async function difference(session, bytes, table, outputs, given, before) {
  const found = await session.run(given, outputs);
  const line = await first(rowsOf(safetensors(bytes), table, outputs), found, before);
  for (const tensor of Object.values(found)) tensor.dispose();
  return line;
}

/** Return the operator and the output of the first node that differs; undefined if none does alone. */
export async function firstNode(open, graph, bytes, given) {
  const file = safetensors(bytes);
  const lines = new TextDecoder().decode(part(file, "debug.names").bytes).trimEnd().split("\n");
  const outputs = lines.map((line) => line.slice(line.indexOf(" ") + 1));
  const suffix = new Uint8Array(part(file, "debug.graph").bytes);
  const whole = new Uint8Array(graph.length + suffix.length); // messages that follow each other are merged
  whole.set(graph);
  whole.set(suffix, graph.length);
  const session = await open(whole);
  try {
    const line = await first(rowsOf(file, "debug.numbers", outputs), await session.run(given, outputs), {});
    const at = line === undefined ? -1 : outputs.findIndex((name) => line.startsWith(`${name}: `));
    return lines[at];
  } finally {
    await session.release();
  }
}

/** Return a key of everything that decides what a device computes; undefined where nothing is remembered, as in Node. */
export async function keyOf(facts, files) {
  if (globalThis.indexedDB === undefined) return undefined;
  const info = facts.onDevice && (await globalThis.navigator?.gpu?.requestAdapter())?.info;
  const { vendor, architecture, device, description } = info || {};
  const told = JSON.stringify([facts, vendor, architecture, device, description, globalThis.navigator?.userAgent]);
  let [a, b] = [0x811c9dc5, 0x9e3779b1];
  for (const bytes of [new TextEncoder().encode(told), ...files.map((file) => bytesOf("file", file))]) {
    for (const x of bytes) [a, b] = [Math.imul(a ^ x, 0x01000193), Math.imul(b + x, 0x85ebca6b) ^ (b >>> 13)];
    a = Math.imul(a ^ bytes.length, 0x01000193);
  }
  return `proof ${(a >>> 0).toString(16)} ${(b >>> 0).toString(16)}`;
}

/** Return whether the browser remembers that numbers agree. */
export const agreed = async (key) => key && (await loadFromIndexedDB(key).catch(() => {})) !== undefined;
export const remember = async (key) => key && saveToIndexedDB(key, new Uint8Array(1)).catch(() => {});
