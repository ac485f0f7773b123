/** Read a host folder, and the entries of a safetensors file. */

import { GraphoptError, told } from "./errors.js";

/** Return a function that reads a file of a host folder: an object, a function, a URL, or a path in Node. */
export function reader(files) {
  const isFolder = typeof files === "string" || files instanceof URL;
  if (!isFolder && (typeof files !== "object" || files === null) && typeof files !== "function")
    throw new GraphoptError(
      `files: expected a host folder: a path, a URL, a function or an object, found ${told(files)}`,
    );
  return async (name) => {
    const bytes = await (isFolder ? fromFolder(files, name) : typeof files === "function" ? files(name) : files[name]);
    if (bytes instanceof ArrayBuffer || ArrayBuffer.isView(bytes)) return bytesOf(name, bytes);
    throw new GraphoptError(`${name}: expected its bytes, a Uint8Array or an ArrayBuffer, found ${told(bytes)}`);
  };
}

/** Return bytes as a Uint8Array of their own. */
export function bytesOf(what, bytes) {
  if (bytes instanceof ArrayBuffer) return new Uint8Array(bytes);
  if (ArrayBuffer.isView(bytes)) return new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength).slice();
  throw new GraphoptError(`${what}: expected bytes, a Uint8Array or an ArrayBuffer, found ${told(bytes)}`);
}

async function fromFolder(folder, name) {
  const address = `${String(folder).replace(/\/$/, "")}/${name}`;
  const disk = globalThis.process?.getBuiltinModule?.("node:fs/promises"); // Node, from 20.16; no bundler follows it
  try {
    if (disk && !/^(https?|data|blob):/.test(address))
      return await disk.readFile(address.startsWith("file:") ? new URL(address) : address);
    const response = await fetch(address);
    if (response.ok) return await response.arrayBuffer();
    throw new Error(`status ${response.status}`);
  } catch (error) {
    const found = ["ENOENT", "ENOTDIR"].includes(error.code) ? "none" : error.message;
    throw new GraphoptError(`${address}: expected a file of a host folder, found ${found}: write it with export_hosts`);
  }
}

const isSize = (x) => Number.isSafeInteger(x) && x >= 0;

/** Return the contract, host.json. */
export function contractOf(bytes) {
  let host;
  const text = new TextDecoder().decode(bytes);
  try {
    host = JSON.parse(text);
  } catch {
    throw new GraphoptError(`host.json: expected JSON, found '${text.slice(0, 30)}': write it with export_hosts again`);
  }
  const found = `${host?.format ?? "other JSON"}${host?.version === undefined ? "" : ` version ${host.version}`}`;
  if (found !== "graphopt.host version 1")
    throw new GraphoptError(`host.json: expected graphopt.host version 1, found ${found}: install another graphopt`);
  const isObject = (x) => x && typeof x === "object";
  const isState = ({ next, shape }) => typeof next === "string" && Array.isArray(shape) && shape.every(isSize);
  const lists = [host.feeds, host.state, host.hyperparameters, host.reports];
  const isEntry = (x) => isObject(x) && typeof x.name === "string" && typeof x.type === "string";
  const isWhole = isObject(host.files) && isObject(host.graphs) && isObject(host.graphs.train);
  if (isWhole && lists.every((list) => Array.isArray(list) && list.every(isEntry)) && host.state.every(isState)) return host;
  throw new GraphoptError("host.json: expected its entries, found others: write it with export_hosts again");
}

/** Return the entries of a safetensors file by name, and its numbers. */
export function safetensors(bytes) {
  try {
    const begin = 8 + Number(new DataView(bytes.buffer).getBigUint64(0, true));
    const { __metadata__, ...entries } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, begin)));
    return { entries, numbers: bytes.subarray(begin) };
  } catch (error) {
    throw new GraphoptError(`checkpoint: expected a safetensors file, found ${bytes.length} bytes: ${error.message}`);
  }
}

/** Return the bits of the bfloat16 or float16 number nearest to a float32 number, ties to even. */
function narrow(type, x) {
  const bits = new Uint32Array(Float32Array.of(x).buffer)[0];
  if (type === "bfloat16") return Number.isNaN(x) ? 0x7fc0 : (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
  const [sign, size] = [(bits >>> 16) & 0x8000, Math.abs(x)];
  if (!(size < 65520)) return sign | (Number.isNaN(x) ? 0x7e00 : 0x7c00);
  const exponent = Math.max(((bits >>> 23) & 255) - 127, -14);
  const [whole, rest] = [Math.floor(size * 2 ** (10 - exponent)), (size * 2 ** (10 - exponent)) % 1];
  return sign | ((exponent + 14) * 1024 + whole + (rest > 0.5 || (rest === 0.5 && whole % 2) ? 1 : 0));
}

/** Put a block of the numbers of a state into a file, which strides place in both, times a factor. */
export function put(bytes, block, numbers) {
  const { state, offset, shape, strides, first, state_strides: own, factor, type } = block;
  const held = numbers?.BYTES_PER_ELEMENT;
  const width = held && type ? 2 : held;
  const lists = [shape, strides, own];
  const isWhole = width && lists.every(Array.isArray) && [offset, first, ...lists.flat()].every(isSize);
  const count = isWhole && shape.reduce((a, b) => a * b, 1);
  const last = (of) => shape.reduce((sum, size, i) => sum + (size - 1) * of[i], 0);
  const isInside = isWhole && first + last(own) < numbers.length && offset + width * (last(strides) + 1) <= bytes.length;
  if (!isInside || !(count <= numbers.length))
    throw new GraphoptError(`host.json: adapters: expected blocks of its state, found others of '${state}': write it with export_hosts`);
  const view = new DataView(bytes.buffer, offset);
  const scale = held === 4 ? Math.fround(factor) : factor;
  for (let i = count - 1; i >= 0; i--) {
    let [rest, to, from] = [i, 0, first];
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      const at = rest % shape[axis];
      [rest, to, from] = [(rest - at) / shape[axis], to + at * strides[axis], from + at * own[axis]];
    }
    if (type) view.setUint16(width * to, narrow(type, Math.fround(scale * numbers[from])), true);
    else view[width === 4 ? "setFloat32" : "setFloat64"](width * to, scale * numbers[from], true);
  }
}
