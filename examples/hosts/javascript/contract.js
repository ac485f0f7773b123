/** Read and check what `graphopt.export_hosts` describes: host.json, types, shapes, labels and safetensors files. */

// NumPy's names of types, which are ONNX Runtime's too: the name in safetensors, and the array that holds the numbers.
export const TYPES = {
  float32: ["F32", Float32Array],
  float64: ["F64", Float64Array],
  float16: ["F16", globalThis.Float16Array ?? Uint16Array],
  int64: ["I64", BigInt64Array],
  int32: ["I32", Int32Array],
  int16: ["I16", Int16Array],
  int8: ["I8", Int8Array],
  uint64: ["U64", BigUint64Array],
  uint32: ["U32", Uint32Array],
  uint16: ["U16", Uint16Array],
  uint8: ["U8", Uint8Array],
  bool: ["BOOL", Uint8Array],
};

/** Report what a user can mend: a file, a tensor or an option. */
export class GraphoptError extends Error {
  name = "GraphoptError";
}

/** Return host.json, or raise an error if it is another format or has a type that JavaScript lacks. */
export function checkedHost(host) {
  if (host.format !== "graphopt.host" || host.version !== 1) {
    const found = `${host.format} version ${host.version}`;
    throw new GraphoptError(`host.json: expected graphopt.host version 1, found ${found}: install another graphopt`);
  }
  const other = [...host.feeds, ...host.state, ...host.hyperparameters].find(({ type }) => !TYPES[type]);
  if (!other) return host;
  throw new GraphoptError(
    `'${other.name}': expected a type that JavaScript has, found ${other.type}: train in float32`,
  );
}

/** Return the entries of a safetensors file by name, and where its numbers begin. */
export function headerOf(bytes) {
  try {
    const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
    return [JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length))), 8 + length];
  } catch (error) {
    throw new GraphoptError(`checkpoint: expected a safetensors file, found ${bytes.length} bytes: ${oneLine(error)}`);
  }
}

/** Return the shape of so many numbers, of which a shape leaves one size open; undefined where there is none. */
export function dimsFor(shape, count) {
  const known = sizeOf((shape ?? []).filter(Number.isInteger));
  const dims = (shape ?? []).map((size) => (Number.isInteger(size) ? size : count / known));
  return sizeOf(dims) === count && dims.every(Number.isInteger) ? dims : undefined;
}

/** Check the shape of a feed; `sizes` collects the sizes of dimensions by name. */
export function checkShape({ name, shape }, dims, sizes) {
  if (!shape) return;
  if (dims.length !== shape.length || shape.some((size, i) => Number.isInteger(size) && size !== dims[i]))
    throw new GraphoptError(`feed '${name}': expected shape [${shape}], found [${dims}]`);
  shape.forEach((dim, i) => {
    const [size, first] = (sizes[dim] ??= [dims[i], name]);
    if (size !== dims[i] && typeof dim === "string")
      throw new GraphoptError(
        `dimension '${dim}': expected one size, found ${size} in '${first}', ${dims[i]} in '${name}'`,
      );
  });
}

/** Check that a target in the host's memory holds labels of the loss. */
export function checkLabels({ name, labels, ignored }, { data, location }) {
  if (!labels || location !== "cpu") return;
  const wrong = data.find((label) => (label < labels[0] || label > labels[1]) && Number(label) !== ignored);
  if (wrong !== undefined)
    throw new GraphoptError(`feed '${name}': expected labels ${labels[0]} to ${labels[1]}, found ${wrong}`);
}

/** Return the entry of a name. */
export function named(entries, name, kind) {
  const found = entries.find((entry) => entry.name === name);
  if (found) return found;
  throw new GraphoptError(`${kind} '${name}': unknown; expected ${entries.map((x) => x.name).join(", ") || "none"}`);
}

/** Return the bytes of a buffer or of a view of one. */
export function asBytes(found, name) {
  if (found instanceof ArrayBuffer) return new Uint8Array(found);
  if (ArrayBuffer.isView(found)) return new Uint8Array(found.buffer, found.byteOffset, found.byteLength);
  throw new GraphoptError(`${name}: expected its bytes, a Uint8Array or an ArrayBuffer, found ${found}`);
}

export const arrayOf = (type, numbers) => TYPES[type][1].from(numbers, type.endsWith("int64") ? BigInt : Number);
export const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);
export const takesNumbers = (type) => TYPES[type][1] !== Uint16Array || type === "uint16";
export const valueOf = (tensor) => (tensor.dims.length ? tensor : numberOf(tensor));
export const oneLine = (error) => String(error.message ?? error).split("\n")[0];

function numberOf({ type, data }) {
  const [bits] = data;
  if (takesNumbers(type)) return Number(bits);
  const [exponent, fraction] = [(bits >> 10) & 31, (bits & 1023) / 1024]; // of a float16 where the host has no such array
  const special = exponent === 31 ? (fraction ? NaN : Infinity) : fraction * 2 ** -14;
  return (bits >> 15 ? -1 : 1) * (exponent % 31 ? (1 + fraction) * 2 ** (exponent - 15) : special);
}
