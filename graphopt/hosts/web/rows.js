/** Read a visitor's pictures and tables as rows: `{ kind, names, count, of, target, labels }`. */

const PICTURE = /\.(png|jpe?g|webp|gif|bmp|avif)$/i;
const MOST_CLASSES = 20; // of a column of whole numbers that is taken for classes
const MOST = 10000; // classes, as the compiler takes them
const MOST_BYTES = 2 ** 31; // of all features
const OPEN_SIZE = 224; // pixels, where the model takes any
const KEEPS = 250; // the opacity, of 255, from which a canvas keeps colours
const SHOWN = 40; // characters of a cell in a message

/** What pixels from 0 to 1 become, by the words of `graphopt tune --pixels`: a mean and a scale of each channel. */
export const PIXELS = {
  unit: [[0], [1]],
  symmetric: [[0.5], [0.5]],
  imagenet: [
    [0.485, 0.456, 0.406],
    [0.229, 0.224, 0.225],
  ],
  bytes: [[0], [1 / 255]],
};

/** Return files of pictures with their classes: the name of the folder that each lies in. */
export function pictures(files) {
  const found = files.filter(({ path }) => PICTURE.test(path)).map(({ file, path }) => ({ file, parts: path.split("/") }));
  const named = found.filter(({ parts }) => parts.length > 1).sort((a, b) => (a.parts.join("/") < b.parts.join("/") ? -1 : 1));
  const labels = [...new Set(named.map(({ parts }) => parts.at(-2)))].sort();
  if (labels.length < 2)
    throw new Error(`pictures: expected a folder for each of two classes or more, found ${labels.length || "no folder of pictures"}`);
  return {
    kind: "pictures",
    labels,
    count: named.length,
    files: named.map(({ file }) => file),
    classes: named.map(({ parts }) => labels.indexOf(parts.at(-2))),
  };
}

/** Return the cells of a text of comma-separated values (RFC 4180), also with semicolons or tabs. */
export function cells(text) {
  const first = text.slice(0, text.indexOf("\n") + 1 || undefined).replace(/"[^"]*"/g, "");
  const delimiter = ["\t", ";", ","].find((one) => first.includes(one)) ?? ",";
  const [rows, quoted] = [[[""]], /"/y];
  let inside = 0; // the row in which a quote begins
  for (let at = 0; at < text.length; at++) {
    const [row, mark] = [rows.at(-1), text[at]];
    quoted.lastIndex = at + 1;
    if (inside && mark === '"' && quoted.test(text)) row[row.length - 1] += text[at++];
    else if (mark === '"') inside = inside ? 0 : rows.length;
    else if (!inside && mark === delimiter) row.push("");
    else if (!inside && mark === "\n") rows.push([""]);
    else if (inside || mark !== "\r") row[row.length - 1] += mark;
  }
  if (inside) throw new Error(`table: row ${inside}: expected a closing quote, found none`);
  return rows.filter((row) => row.length > 1 || row[0].trim());
}

/** Return a table whose first row names its columns. */
export function table(text) {
  const [names, ...rows] = cells(text.replace(/^\uFEFF/, ""));
  if (!names || names.length < 2 || rows.length < 2)
    throw new Error("table: expected a row of names, two columns or more and two rows or more, found fewer");
  const wrong = rows.findIndex((row) => row.length !== names.length);
  if (wrong >= 0)
    throw new Error(`table: row ${wrong + 2}: expected ${names.length} cells, as in the first row, found ${rows[wrong].length}`);
  return { kind: "table", names, rows, count: rows.length };
}

const isNumber = (cell) => cell.trim() !== "" && Number.isFinite(Number(cell));

/** Return the cells of a target, equal numbers in equal words, and its classes; without classes where it has numbers. */
function targetsOf(name, column) {
  const isOfNumbers = 2 * column.filter(isNumber).length > column.length;
  const wrong = column.findIndex((cell) => !cell || (isOfNumbers && !isNumber(cell)));
  if (wrong >= 0)
    throw new Error(
      `table: row ${wrong + 2}: column '${name}': expected a ${isOfNumbers ? "number" : "class"}, ` +
        `found '${column[wrong].slice(0, SHOWN)}': fill it in, or leave the row out`,
    );
  const targets = isOfNumbers ? column.map((cell) => String(Number(cell))) : column;
  const values = [...new Set(targets)];
  if (values.length < 2) throw new Error(`table: column '${name}': expected two different cells or more, found '${values[0].slice(0, SHOWN)}' alone`);
  if (isOfNumbers && (values.length > MOST_CLASSES || !values.every((cell) => Number.isInteger(Number(cell))))) return [targets];
  if (values.length > MOST)
    throw new Error(`table: column '${name}': expected at most ${MOST} classes, found ${values.length}: predict another column`);
  return [targets, values.sort((a, b) => (isOfNumbers ? a - b : a < b ? -1 : 1))];
}

/** Return a table with the classes or the numbers of its target, and its other columns as numbers. */
export function withTarget(data, target) {
  const at = data.names.indexOf(target);
  const [column, labels] = targetsOf(target, data.rows.map((row) => row[at].trim()));
  const others = data.names.map((name, i) => [name, i]).filter(([, i]) => i !== at);
  const numbers = new Float32Array(data.count * others.length);
  data.rows.forEach((row, i) =>
    others.forEach(([name, from], j) => {
      if (!isNumber(row[from]))
        throw new Error(
          `table: row ${i + 2}: column '${name}': expected a number, found '${row[from].slice(0, SHOWN)}': leave the column out`,
        );
      numbers[i * others.length + j] = Number(row[from]);
    }),
  );
  const order = labels && new Map(labels.map((label, i) => [label, i]));
  return {
    ...data,
    target,
    width: others.length,
    numbers,
    labels,
    classes: labels && column.map((cell) => order.get(cell)),
    values: column.map(Number),
  };
}

const sizeOf = (dims) => dims.reduce((a, b) => a * b, 1);

/** Return the features of each row in the shape that a model takes, as [sizes of a row, all numbers]. */
export async function features(data, shape, pixels, progress) {
  if (data.kind === "table") {
    const known = sizeOf(shape.slice(1).filter(Number.isInteger));
    const dims = shape.slice(1).map((size) => (Number.isInteger(size) ? size : data.width / known)); // of which one may be open
    if (sizeOf(dims) !== data.width || !dims.every(Number.isInteger))
      throw new Error(
        `table: expected ${known} columns beside the target, as the model takes, found ${data.width}: leave out or add some`,
      );
    return [dims, data.numbers];
  }
  if (shape.length !== 4) throw new Error(`the model: expected an input of pictures, [rows, channels, height, width], found [${shape}]`);
  const isFirst = [1, 3].includes(shape[1]) || ![1, 3].includes(shape[3]); // channels
  const [channels, height, width] = isFirst ? shape.slice(1) : [shape[3], shape[1], shape[2]];
  const size = [width, height].map((pixel) => (Number.isInteger(pixel) ? pixel : OPEN_SIZE));
  if (![1, 3].includes(channels)) throw new Error(`the model: expected pictures of 1 or 3 channels, found [${shape}]`);
  const of = size[0] * size[1] * channels;
  const most = Math.floor(MOST_BYTES / (4 * of));
  if (data.count > most) throw new Error(`pictures: expected at most ${most} of ${size[0]} x ${size[1]} pixels, found ${data.count}`);
  const all = new Float32Array(data.count * of);
  for (const [i, file] of data.files.entries()) {
    all.set(await picture(file, size, channels, isFirst, PIXELS[pixels]), i * of);
    if (i % 16 === 15) await progress(i + 1);
  }
  return [isFirst ? [channels, size[1], size[0]] : [size[1], size[0], channels], all];
}

/** Return a picture as numbers: as large as it fits over the size, its middle, each channel less a mean by a scale. */
async function picture(file, [width, height], channels, isFirst, [means, scales]) {
  const isOpaque = file.type === "image/jpeg";
  const read = isOpaque ? Promise.reject() : opaque(file);
  const bitmap = await read.catch(() => createImageBitmap(file, { colorSpaceConversion: "none" })).catch(() => {
    throw new Error(`${file.name}: expected a picture that this browser reads`);
  });
  const larger = Math.max(width / bitmap.width, height / bitmap.height);
  const [w, h] = [bitmap.width * larger, bitmap.height * larger];
  const paper = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  paper.imageSmoothingQuality = "high";
  paper.drawImage(bitmap, (width - w) / 2, (height - h) / 2, w, h);
  bitmap.close();
  const { data } = paper.getImageData(0, 0, width, height);
  const count = width * height;
  const numbers = new Float32Array(count * channels);
  for (let i = 0; i < count; i++) {
    if (!isOpaque && data[4 * i + 3] < KEEPS)
      throw new Error(
        `${file.name}: expected opaque pixels, found transparent ones, whose colours this browser does not keep: ` +
          "save it as a JPEG, or smaller",
      );
    const colors = data.subarray(4 * i, 4 * i + 3);
    for (let c = 0; c < channels; c++) {
      const value = (channels === 3 ? colors[c] : 0.299 * colors[0] + 0.587 * colors[1] + 0.114 * colors[2]) / 255;
      numbers[isFirst ? c * count + i : i * channels + c] = (value - (means[c] ?? means[0])) / (scales[c] ?? scales[0]);
    }
  }
  return numbers;
}

let gl; // a canvas of two dimensions multiplies colours by their opacity

/** Return a picture whose colours stay, however transparent it was; fail where this browser cannot. */
async function opaque(file) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  if (!gl || gl.isContextLost()) gl = new OffscreenCanvas(1, 1).getContext("webgl2");
  const { width, height } = bitmap;
  if (Math.max(width, height) > gl.getParameter(gl.MAX_TEXTURE_SIZE)) throw new Error("a picture that is larger than a texture");
  const [pixels, texture, frame] = [new Uint8Array(4 * width * height), gl.createTexture(), gl.createFramebuffer()];
  gl.bindFramebuffer(gl.FRAMEBUFFER, frame);
  gl.bindTexture(gl.TEXTURE_2D, texture);
  gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA, gl.RGBA, gl.UNSIGNED_BYTE, bitmap);
  gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, texture, 0);
  gl.readPixels(0, 0, width, height, gl.RGBA, gl.UNSIGNED_BYTE, pixels);
  gl.deleteFramebuffer(frame);
  gl.deleteTexture(texture);
  bitmap.close();
  if (gl.getError() || gl.isContextLost()) {
    gl = undefined; // its other errors, too
    throw new Error("WebGL has failed");
  }
  for (let i = 3; i < pixels.length; i += 4) pixels[i] = 255;
  return createImageBitmap(new ImageData(new Uint8ClampedArray(pixels.buffer), width, height), { colorSpaceConversion: "none" });
}

/** Return the files of a drop, also in folders, with their paths. */
export async function dropped(items) {
  const found = [];
  const walk = async (entry, path) => {
    if (entry.isFile) return found.push({ file: await new Promise((done, fail) => entry.file(done, fail)), path: path + entry.name });
    const reader = entry.createReader();
    for (;;) {
      const some = await new Promise((done, fail) => reader.readEntries(done, fail));
      if (!some.length) return;
      for (const one of some) await walk(one, `${path}${entry.name}/`);
    }
  };
  const entries = [...items].map((item) => item.webkitGetAsEntry()).filter(Boolean); // before the first await
  for (const entry of entries) await walk(entry, "");
  return found;
}
