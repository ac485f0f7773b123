/**
 * Train an ONNX model in Node or in a browser, from the files that `graphopt.export_hosts` writes.
 * index.d.ts says what each call does. Checked here is what ONNX Runtime does not check, or reports without a name.
 */

export * from "./storage.js";

export class GraphoptError extends Error {
  name = "GraphoptError";
}

export class Trainer {
  #ort;
  #options;
  #onDevice; // whether state stays on a GPU
  #read; // returns the bytes of a file of the host folder
  #initial; // the file of the initial state, whose layout checkpoints have
  #held = {}; // tensors by name: state and hyperparameters
  #sessions = {}; // promises, by the name of the graph
  #last = Promise.resolve(); // the newest call: a session runs one at a time

  static async create(ort, files, options = {}) {
    const trainer = new Trainer();
    trainer.#ort = ort;
    trainer.#options = { stepsPerCall: 16, ...options };
    const [provider] = options.executionProviders ?? [];
    trainer.#onDevice = (provider?.name ?? provider) === "webgpu";
    trainer.#read = reader(files);
    trainer.host = JSON.parse(new TextDecoder().decode(await trainer.#read("host.json")));
    const { format, version, hyperparameters } = trainer.host;
    const found = `${format} version ${version}`;
    if (found !== "graphopt.host version 1")
      throw new GraphoptError(`host.json: expected graphopt.host version 1, found ${found}: install another graphopt`);
    trainer.#initial = await trainer.#read(trainer.host.files.state);
    trainer.#restore(trainer.#initial);
    trainer.set(mapped(byName(hyperparameters), (x) => x.default));
    await (trainer.#sessions.train = trainer.#open("train"));
    return trainer;
  }

  step(feeds) {
    return this.#turn(() => this.#run("train", this.#tensors("train", feeds)));
  }

  run(batches) {
    return this.#turn(async () => {
      const tensors = batches.map((feeds) => this.#tensors("train", feeds)); // all are checked before the first step
      const most = this.host.graphs.train_steps && !this.#onDevice ? this.#options.stepsPerCall : 1;
      const reports = [];
      while (tensors.length) {
        const some = tensors.splice(0, most);
        const shapes = some.map((batch) => JSON.stringify(Object.values(batch).map(({ dims }) => dims)));
        if (some.length > 1 && new Set(shapes).size === 1) {
          const stacked = await this.#run("train_steps", this.#stacked(some));
          reports.push(...some.map((_, i) => this.#row(stacked, i)));
        } else {
          for (const batch of some) reports.push(await this.#run("train", batch));
        }
      }
      return reports;
    });
  }

  evaluate(feeds) {
    return this.#turn(() => this.#run("evaluate", this.#tensors("evaluate", feeds)));
  }

  predict(feeds) {
    return this.#turn(() => this.#run("predict", this.#tensors("predict", feeds)));
  }

  set(values) {
    const tensors = mapped(values, (value, name) => {
      const { type, shape } = named("hyperparameter", name, byName(this.host.hyperparameters));
      const numbers = [value].flat(Infinity);
      if (numbers.length !== sizeOf(shape) || !numbers.every(Number.isFinite))
        throw new GraphoptError(`hyperparameter '${name}': expected finite numbers [${shape}], found ${value}`);
      return new this.#ort.Tensor(type, numbers, shape);
    });
    Object.assign(this.#held, tensors);
  }

  state() {
    return this.#turn(async () => {
      const state = {};
      for (const { name } of this.host.state) state[name] = (await this.#held[name].getData()).slice();
      return state;
    });
  }

  async save() {
    const [state, bytes] = [await this.state(), this.#initial.slice()];
    for (const { name, offset } of this.host.state) bytes.set(new Uint8Array(state[name].buffer), offset);
    return bytes;
  }

  load(checkpoint) {
    return this.#turn(async () => this.#restore(new Uint8Array(checkpoint)));
  }

  async trained() {
    const { inference, state } = this.host.files;
    return { [inference]: await this.#read(inference), [state]: await this.save() };
  }

  dispose() {
    return this.#turn(async () => {
      for (const tensor of Object.values(this.#held)) tensor.dispose(); // before the session that made them
      for (const session of await Promise.all(Object.values(this.#sessions))) await session.release();
      this.#sessions = {};
    });
  }

  /** Do work after all earlier calls. */
  #turn(work) {
    const turn = this.#last.then(work);
    this.#last = turn.catch(() => {});
    return turn;
  }

  async #open(graph) {
    const file = this.host.files[graph];
    const floats = this.host.state.filter(({ type }) => type.startsWith("float"));
    const preferredOutputLocation = Object.fromEntries(floats.map(({ next }) => [next, "gpu-buffer"]));
    const options = { ...(this.#onDevice && { preferredOutputLocation }), ...this.#options };
    const session = await this.#ort.InferenceSession.create(await this.#read(file), options);
    const { state, hyperparameters } = this.host.graphs[graph];
    const missing = [...state, ...hyperparameters].find((name) => !session.inputNames.includes(name));
    if (missing === undefined) return session;
    await session.release();
    throw new GraphoptError(`${file}: expected a plain input '${missing}', found none: write it with export_hosts`);
  }

  /** Run a graph, keep the state that it returns, and return what it reports. */
  async #run(graph, feeds) {
    const session = await (this.#sessions[graph] ??= this.#open(graph));
    const { state, hyperparameters, reports } = this.host.graphs[graph];
    const written = graph.startsWith("train") ? this.host.state : [];
    const read = (written.length && this.#options.report) || reports;
    for (const name of [...state, ...hyperparameters]) feeds[name] = this.#held[name];
    const found = await session.run(feeds, [...read, ...written.map(({ next }) => next)]);
    for (const { name, next } of written) {
      this.#held[name].dispose();
      this.#held[name] = found[next];
    }
    return Object.fromEntries(read.map((name) => [name, valueOf(found[name])]));
  }

  /** Return what a graph reads of feeds, as tensors that fit. */
  #tensors(graph, feeds) {
    const known = byName(this.host.feeds);
    for (const name of Object.keys(feeds)) named("feed", name, known);
    const sizes = {}; // of dimensions, by name
    const read = named("graph", graph, this.host.graphs).feeds;
    return Object.fromEntries(read.map((name) => [name, this.#tensor(known[name], feeds[name], sizes)]));
  }

  #tensor({ name, type, shape, labels, ignored }, fed, sizes) {
    const tensor = fed instanceof this.#ort.Tensor ? fed : this.#tensorOf(name, type, shape ?? [], fed);
    const { dims, location } = tensor;
    const sizeAt = (dim, i) => (typeof dim === "string" ? (sizes[dim] ??= dims[i]) : (dim ?? dims[i]));
    const expected = `${type} [${shape ? shape.map(sizeAt) : dims}]`;
    if (`${tensor.type} [${dims}]` !== expected)
      throw new GraphoptError(`feed '${name}': expected ${expected}, found ${tensor.type} [${dims}]`);
    if (!labels || location !== "cpu") return tensor;
    const wrong = tensor.data.find((label) => (label < labels[0] || label > labels[1]) && Number(label) !== ignored);
    if (wrong === undefined) return tensor;
    throw new GraphoptError(`feed '${name}': expected labels ${labels[0]} to ${labels[1]}, found ${wrong}`);
  }

  /** Return numbers as a tensor, of whose shape one size may be open. */
  #tensorOf(name, type, shape, fed) {
    const numbers = Array.isArray(fed) ? fed.flat(Infinity) : fed;
    const known = sizeOf(shape.filter(Number.isInteger));
    const dims = shape.map((size) => (Number.isInteger(size) ? size : numbers?.length / known));
    try {
      return new this.#ort.Tensor(type, numbers, dims);
    } catch (error) {
      const found = numbers?.length ? `${numbers.length} numbers in ${fed.constructor.name}` : fed;
      throw new GraphoptError(`feed '${name}': expected ${type} [${shape}], found ${found}: ${error.message}`);
    }
  }

  /** Return batches of one shape as one, with an axis of steps first. */
  #stacked(batches) {
    return mapped(batches[0], ({ type, dims, size, data }, name) => {
      const stacked = new data.constructor(size * batches.length);
      batches.forEach((batch, i) => stacked.set(batch[name].data, i * size));
      return new this.#ort.Tensor(type, stacked, [batches.length, ...dims]);
    });
  }

  #row(reports, i) {
    return mapped(reports, ({ type, data, dims }) => {
      const size = data.length / dims[0];
      return valueOf(new this.#ort.Tensor(type, data.slice(i * size, (i + 1) * size), dims.slice(1)));
    });
  }

  /** Replace the state by that of a checkpoint, whose tensors may stand in another order and beside metadata. */
  #restore(bytes) {
    const [own, found] = [safetensors(this.#initial), safetensors(bytes)];
    const told = (entry) => (entry ? `${entry.dtype} [${entry.shape}]` : "none");
    for (const name of Object.keys({ ...own.entries, ...found.entries })) {
      const [expected, other] = [told(own.entries[name]), told(found.entries[name])];
      const difference = `checkpoint: state '${name}': expected ${expected}, found ${other}`;
      if (other !== expected) throw new GraphoptError(`${difference}: take a checkpoint of this training graph`);
    }
    const [expected, length] = [own.numbers.length, found.numbers.length];
    if (length !== expected)
      throw new GraphoptError(`checkpoint: expected ${expected} bytes after its header, found ${length}: it is cut`);
    const tensors = this.host.state.map(({ name, type, shape }) => {
      const { buffer } = found.numbers.slice(...found.entries[name].data_offsets);
      const Numbers = type === "float16" ? FLOAT16 : new this.#ort.Tensor(type, [], [0]).data.constructor;
      return [name, new this.#ort.Tensor(type, new Numbers(buffer), shape)];
    });
    for (const { name } of this.host.state) this.#held[name]?.dispose();
    Object.assign(this.#held, Object.fromEntries(tensors));
  }
}

/** Return a function that reads a file of a host folder: an object, a function or a URL. */
function reader(files) {
  const fromUrl = typeof files === "string" || files instanceof URL;
  return async (name) => {
    const bytes = await (fromUrl ? fetched(files, name) : typeof files === "function" ? files(name) : files[name]);
    if (bytes) return new Uint8Array(bytes);
    throw new GraphoptError(`${name}: expected its bytes, a Uint8Array or an ArrayBuffer, found ${bytes}`);
  };
}

async function fetched(folder, name) {
  const response = await fetch(`${String(folder).replace(/\/$/, "")}/${name}`);
  if (response.ok) return response.arrayBuffer();
  throw new GraphoptError(`${response.url}: expected a file of a host folder, found status ${response.status}`);
}

/** Return the entries of a safetensors file by name, and its numbers. */
function safetensors(bytes) {
  try {
    const begin = 8 + Number(new DataView(bytes.buffer).getBigUint64(0, true));
    const { __metadata__, ...entries } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, begin)));
    return { entries, numbers: bytes.subarray(begin) };
  } catch (error) {
    throw new GraphoptError(`checkpoint: expected a safetensors file, found ${bytes.length} bytes: ${error.message}`);
  }
}

/** Return what has a name. */
function named(kind, name, known) {
  if (Object.hasOwn(known, name)) return known[name];
  throw new GraphoptError(`${kind} '${name}': unknown; expected ${Object.keys(known).join(", ") || "none"}`);
}

const FLOAT16 = globalThis.Float16Array ?? Uint16Array; // what ONNX Runtime has for it
const byName = (entries) => Object.fromEntries(entries.map((entry) => [entry.name, entry]));
const mapped = (object, f) => Object.fromEntries(Object.entries(object).map(([name, x]) => [name, f(x, name)]));
const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);

/** Return a scalar as a number, and other tensors as they are. */
function valueOf(tensor) {
  const { type, dims, data } = tensor;
  if (dims.length) return tensor;
  if (type !== "float16" || FLOAT16 !== Uint16Array) return Number(data[0]);
  const [sign, exponent, fraction] = [data[0] >> 15 ? -1 : 1, (data[0] >> 10) & 31, data[0] & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}
