/** Compare what a device computes of a batch with the numbers in a host folder, and remember that they agree. */

import { GraphoptError } from "./errors.js";
import { safetensors } from "./files.js";
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
    a += x * (1 - 2 * (h & 1)); // no branch: half of them would be guessed wrong
    b += x * (1 - (h & 2));
    c += x * (1 - ((h >> 1) & 2));
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
  const rows = rowsOf(safetensors(bytes), table, outputs);
  const line = await first(rows, found, before);
  for (const tensor of Object.values(found)) tensor.dispose();
  const missing = rows.filter(([name, allowed]) => before[name] && allowed === Infinity).length;
  if (line === undefined && missing) throw new GraphoptError(`states that are not compared: ${missing}`);
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

const sha256 = async (bytes) => btoa(String.fromCharCode(...new Uint8Array(await crypto.subtle.digest("SHA-256", bytes))));
const digests = new WeakMap(); // promises, by file: all graphs read that of weights
const digestOf = (file) => digests.get(file) ?? digests.set(file, sha256(file)).get(file);

/** Return a key of everything that decides what a device computes; undefined where this is not known, or as in Node. */
export async function keyOf(facts, providers = [], env = {}, files) {
  const isKnown = (x) => ["webgpu", "wasm", "cpu"].includes(x?.name ?? x) && !x.device;
  const { indexedDB, crypto, navigator: { gpu, userAgent } = {} } = globalThis; // subtle: only on https and localhost
  if (!indexedDB || !crypto?.subtle || !providers.every(isKnown) || env.wasm?.wasmBinary) return undefined;
  const { adapter, powerPreference, forceFallbackAdapter } = env.webgpu ?? {}; // as ONNX Runtime asks for it
  const asked = async () => (await adapter) ?? gpu?.requestAdapter({ powerPreference, forceFallbackAdapter });
  const info = providers.some((x) => (x.name ?? x) === "webgpu") && (await asked())?.info;
  const ofDevice = ["vendor", "architecture", "device", "description"].map((name) => info?.[name]);
  const scalars = [env.versions, env.wasm, env.webgpu].map((x) => Object.entries(x ?? {}).filter(([, y]) => Object(y) !== y));
  const told = [facts, providers, scalars, env.wasm?.wasmPaths, userAgent, ofDevice, await Promise.all(files.map(digestOf))];
  return `proof ${await sha256(new TextEncoder().encode(JSON.stringify(told)))}`;
}

/** Return whether the browser remembers that numbers agree. */
export const agreed = async (key) => key && (await loadFromIndexedDB(key).catch(() => {})) !== undefined;
export const remember = async (key) => key && saveToIndexedDB(key, new Uint8Array(1)).catch(() => {});
