/** Put the weights of a trained model into its ONNX file. */

const GRAPH = 7; // numbers of fields in onnx.proto
const METADATA = 14;
const INITIALIZER = 5;
const [RAW_DATA, EXTERNAL_DATA, DATA_LOCATION] = [9, 13, 14];
const [KEY, VALUE] = [1, 2];
const LABELS = "labels";
const BYTES = 2; // a field with a length, in the encoding of protobuf

/** Return an ONNX file with the numbers to which it refers in other files, by their names. */
export function inOneFile(model, files) {
  return changed(model, GRAPH, (graph) => changed(graph, INITIALIZER, (tensor) => withNumbers(tensor, files)));
}

/** Return an ONNX file with the names of its classes in its metadata, where graphopt reads them. */
export function withLabels(model, labels) {
  const others = [...fields(model)].filter(({ number, content }) => number !== METADATA || entry(content)[0] !== LABELS);
  const [key, value] = [LABELS, JSON.stringify(labels)].map((text) => new TextEncoder().encode(text));
  return joined([...others.map(({ whole }) => whole), ...field(METADATA, joined([...field(KEY, key), ...field(VALUE, value)]))]);
}

function withNumbers(tensor, files) {
  const all = [...fields(tensor)];
  const said = all.filter(({ number }) => number === EXTERNAL_DATA).map(({ content }) => entry(content));
  if (!said.length) return tensor;
  const { location, offset = 0, length } = Object.fromEntries(said);
  const numbers = files[location].subarray(Number(offset), length && Number(offset) + Number(length));
  const kept = all.filter(({ number }) => number !== EXTERNAL_DATA && number !== DATA_LOCATION);
  return joined([...kept.map(({ whole }) => whole), ...field(RAW_DATA, numbers)]);
}

/** Return [key, value] of a StringStringEntryProto. */
function entry(bytes) {
  const found = Object.fromEntries([...fields(bytes)].map(({ number, content }) => [number, new TextDecoder().decode(content)]));
  return [found[KEY], found[VALUE]];
}

/** Return a message whose fields of a number are changed. */
function changed(message, wanted, change) {
  return joined(
    [...fields(message)].flatMap(({ number, content, whole }) =>
      number === wanted ? field(number, change(content)) : [whole],
    ),
  );
}

/** Yield the number, the content and all bytes of each field of a message. */
function* fields(bytes) {
  let at = 0;
  const varint = () => {
    let [value, scale] = [0, 1];
    for (;;) {
      const byte = bytes[at++];
      value += (byte & 127) * scale;
      if (!(byte & 128)) return value;
      scale *= 128;
    }
  };
  while (at < bytes.length) {
    const start = at;
    const tag = varint();
    const kind = tag % 8;
    const size = kind === BYTES ? varint() : { 1: 8, 5: 4 }[kind];
    if (size === undefined) varint();
    const from = at;
    at += size ?? 0;
    yield { number: Math.floor(tag / 8), content: bytes.subarray(from, at), whole: bytes.subarray(start, at) };
  }
}

/** Return the parts of a field with a length. */
function field(number, content) {
  return [Uint8Array.from([...varint(8 * number + BYTES), ...varint(content.length)]), content];
}

function varint(number) {
  return number < 128 ? [number] : [(number % 128) + 128, ...varint(Math.floor(number / 128))];
}

function joined(parts) {
  const bytes = new Uint8Array(parts.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}
