/** Make tensors of what a user feeds, and numbers of what ONNX Runtime returns. */

import { GraphoptError, told } from "./errors.js";

const HALF = globalThis.Float16Array ?? Uint16Array; // what ONNX Runtime has for float16
const WHOLE = { int8: 7, int16: 15, int32: 31, int64: 63, uint8: 8, uint16: 16, uint32: 32, uint64: 64 }; // bits
export const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);
export const isTensor = (x) => Array.isArray(x?.dims) && typeof x.type === "string";

/** Return the array class of an element type. */
export function arrayClass(ort, type) {
  return type === "float16" ? HALF : new ort.Tensor(type, [], [0]).data.constructor;
}

/**
 * Return what is fed as a tensor that fits its description in host.json.
 *
 * @param sizes the sizes of dimensions by name, to which those of this tensor are added
 */
export function tensorOf(ort, { name, type, shape, labels, ignored }, fed, sizes) {
  const tensor = isTensor(fed) ? fed : fromNumbers(ort, name, type, shape ?? [], fed, sizes);
  const { dims, location } = tensor;
  const sizeAt = (dim, i) => (typeof dim === "string" ? (sizes[dim] ??= dims[i]) : (dim ?? dims[i]));
  const expected = `${type} [${shape ? shape.map(sizeAt) : dims}]`;
  if (`${tensor.type} [${dims}]` !== expected)
    throw new GraphoptError(`feed '${name}': expected ${expected}, found ${tensor.type} [${dims}]`);
  if (dims.includes(0))
    throw new GraphoptError(`feed '${name}': expected a row or more, found ${tensor.type} [${dims}]`);
  if (!labels || (location ?? "cpu") !== "cpu") return tensor;
  const wrong = tensor.data.find((label) => (label < labels[0] || label > labels[1]) && Number(label) !== ignored);
  if (wrong === undefined) return tensor;
  throw new GraphoptError(`feed '${name}': expected labels ${labels[0]} to ${labels[1]}, found ${wrong}`);
}

function fromNumbers(ort, name, type, shape, fed, sizes) {
  const expected = `feed '${name}': expected ${type} [${shape.map((size) => sizes[size] ?? size ?? "?")}]`;
  if (!Array.isArray(fed) && (!ArrayBuffer.isView(fed) || fed instanceof DataView))
    throw new GraphoptError(`${expected}, found ${told(fed)}: feed an array of numbers, or an ort.Tensor`);
  const nested = Array.isArray(fed) ? nesting(fed) : [fed.length];
  const numbers = Array.isArray(fed) ? fed.flat(Infinity) : fed;
  const known = shape.map((size) => (Number.isInteger(size) ? size : sizes[size]));
  const open = known.filter((size) => size === undefined).length;
  if (nested.length !== shape.length && open > 1)
    throw new GraphoptError(`${expected}, of which ${open} sizes are open, found ${told(fed)}: feed an ort.Tensor`);
  const rest = numbers.length / sizeOf(known.filter(Number.isInteger));
  const dims = nested.length > 1 && nested.length === shape.length ? nested : known.map((size) => size ?? rest);
  if (!dims.every(Number.isInteger) || sizeOf(dims) !== numbers.length)
    throw new GraphoptError(`${expected}, found ${told(numbers)}: feed whole rows`);
  return new ort.Tensor(type, converted(ort, expected, type, numbers), dims);
}

/** Return the sizes of arrays in arrays, by the first of each. */
function nesting(array) {
  return Array.isArray(array) ? [array.length, ...nesting(array[0])] : [];
}

/** Return numbers in the array class of an element type, none of which changes its value but by rounding. */
function converted(ort, expected, type, numbers) {
  const fail = (found) => {
    throw new GraphoptError(`${expected}, found ${found}`);
  };
  let Numbers;
  try {
    Numbers = arrayClass(ort, type);
  } catch (error) {
    fail(`${told(numbers)}, and ONNX Runtime has no array for it: ${error.message}`);
  }
  if (numbers instanceof Numbers || (type === "float16" && numbers instanceof Uint16Array)) return numbers;
  if (type === "float16" && HALF === Uint16Array) fail(`${told(numbers)}: feed the bits of each in a Uint16Array`);
  const [bits, signed] = [WHOLE[type], !type.startsWith("u")];
  const wide = type.endsWith("int64");
  const result = new Numbers(numbers.length);
  for (let i = 0; i < numbers.length; i++) {
    const x = numbers[i];
    if (!["number", "bigint", "boolean"].includes(typeof x)) fail(`${told(x)} at place ${i}`);
    const number = Number(x);
    if (bits && !(Number.isInteger(number) && number < 2 ** bits && number >= (signed ? -(2 ** bits) : 0)))
      fail(`${x} at place ${i}, which is no whole number of this type`);
    result[i] = wide ? BigInt(x) : number;
  }
  return result;
}

/** Return a scalar as a number, and other tensors as they are. */
export function valueOf(tensor) {
  return tensor.dims.length ? tensor : numbersOf(tensor)[0];
}

/** Return whether all numbers of a tensor on the CPU are finite. */
export function isFinite({ type, data }) {
  if (type === "float16" && HALF === Uint16Array) return data.every((bits) => ((bits >> 10) & 31) !== 31);
  return !type.startsWith("float") || data.every((x) => Number.isFinite(x));
}

export function numbersOf({ type, data }) {
  if (type !== "float16" || HALF !== Uint16Array) return Array.from(data, Number);
  return Array.from(data, (bits) => {
    const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
  });
}
