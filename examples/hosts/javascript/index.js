/**
 * Train an ONNX model in Node or in a browser, from the files that `graphopt.export_hosts` writes.
 * ONNX Runtime is passed in: onnxruntime-node, onnxruntime-web or onnxruntime-web/webgpu. Types are in index.d.ts.
 */

import {
  GraphoptError,
  TYPES,
  arrayOf,
  asBytes,
  checkLabels,
  checkShape,
  checkedHost,
  dimsFor,
  headerOf,
  named,
  oneLine,
  sizeOf,
  takesNumbers,
  valueOf,
} from "./contract.js";

export { GraphoptError };

const OTHER_STEP = "take a checkpoint of this training graph";

/** Hold a training graph with its state, and train it. */
export class Trainer {
  #ort;
  #read;
  #options;
  #host;
  #initial; // the bytes of the initial state, whose header checkpoints repeat
  #state = {}; // tensors by name
  #hyperparameters = {};
  #sessions = {}; // promises, by the name of the graph
  #last = Promise.resolve(); // the newest call: a session runs one at a time

  /** Read a host folder, and open a session of its training graph. */
  static async create(ort, files, options = {}) {
    const trainer = new Trainer();
    trainer.#ort = ort;
    trainer.#options = { stepsPerCall: 16, ...options };
    trainer.#read = reader(files);
    trainer.#host = checkedHost(JSON.parse(new TextDecoder().decode(await trainer.#read("host.json"))));
    trainer.#initial = await trainer.#read(trainer.#host.files.state);
    trainer.#restore(trainer.#initial);
    trainer.set(Object.fromEntries(trainer.#host.hyperparameters.map((x) => [x.name, x.default])));
    await trainer.#session("train");
    return trainer;
  }

  /** Return the contract, host.json. */
  get host() {
    return this.#host;
  }

  /** Do one training step on a batch, and return what it reports. */
  step(feeds) {
    return this.#turn(() => this.#run("train", this.#tensors("train", feeds)));
  }

  /** Do a step on each batch, several in one call of the runtime where that is faster; return what each reports. */
  run(batches) {
    return this.#turn(async () => {
      const tensors = batches.map((feeds) => this.#tensors("train", feeds));
      const reports = [];
      while (tensors.length) {
        const together = tensors.splice(0, this.#alike(tensors));
        if (together.length === 1) reports.push(await this.#run("train", together[0]));
        else reports.push(...this.#unstacked(await this.#run("train_steps", this.#stacked(together)), together.length));
      }
      return reports;
    });
  }

  /** Return the losses, metrics and predictions of a batch in the inference form. */
  evaluate(feeds) {
    return this.#turn(() => this.#run("evaluate", this.#tensors("evaluate", feeds)));
  }

  /** Return the model's outputs in the inference form. */
  predict(feeds) {
    return this.#turn(() => this.#run("predict", this.#tensors("predict", feeds)));
  }

  /** Set hyperparameters for all later steps. */
  set(values) {
    const tensors = Object.entries(values).map(([name, value]) => {
      const { type, shape } = named(this.#host.hyperparameters, name, "hyperparameter");
      const numbers = [value].flat(Infinity);
      if (numbers.length !== sizeOf(shape) || !numbers.every(Number.isFinite))
        throw new GraphoptError(`hyperparameter '${name}': expected finite numbers [${shape}], found ${value}`);
      return [name, new this.#ort.Tensor(type, arrayOf(type, numbers), shape)];
    });
    Object.assign(this.#hyperparameters, Object.fromEntries(tensors));
  }

  /** Return copies of the state by name: parameters, optimizer slots, statistics and counters. */
  state() {
    return this.#turn(async () => {
      const state = {};
      for (const { name } of this.#host.state) state[name] = (await this.#state[name].getData()).slice();
      return state;
    });
  }

  /** Return the state as a checkpoint: the bytes of a safetensors file, which graphopt loads in Python too. */
  async save() {
    const [state, bytes] = [await this.state(), this.#initial.slice()];
    for (const { name, offset } of this.#host.state) bytes.set(asBytes(state[name], name), offset);
    return bytes;
  }

  /** Replace the state by that of a checkpoint. If the checkpoint does not fit, nothing is replaced. */
  load(checkpoint) {
    return this.#turn(async () => this.#restore(asBytes(checkpoint, "checkpoint")));
  }

  /** Return the trained model as two files: its graph, and the checkpoint that holds its weights. */
  async trained() {
    const { inference, state } = this.#host.files;
    return { [inference]: await this.#read(inference), [state]: await this.save() };
  }

  /** Return a session of the trained model. */
  async trainedSession(options = this.#sessionOptions) {
    const { inference, state } = this.#host.files;
    const files = await this.trained();
    const externalData = [{ path: state, data: files[state] }];
    return this.#ort.InferenceSession.create(files[inference], { ...options, externalData });
  }

  /** Give back the sessions, and the state on the device. */
  dispose() {
    return this.#turn(async () => {
      for (const tensor of Object.values(this.#state)) tensor.dispose(); // before the session that made them
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

  get #onDevice() {
    const [first] = this.#options.executionProviders ?? [];
    return (first?.name ?? first) === "webgpu";
  }

  get #sessionOptions() {
    const { executionProviders, sessionOptions } = this.#options;
    return { ...(executionProviders && { executionProviders }), ...sessionOptions };
  }

  /** Return the session of a graph, which is opened once. */
  #session(graph) {
    return (this.#sessions[graph] ??= this.#open(graph));
  }

  async #open(graph) {
    const { files, graphs, runtime } = this.#host;
    const known = Object.keys(graphs).join(", ");
    if (!graphs[graph]) throw new GraphoptError(`graph '${graph}': expected one of the folder (${known}), found none`);
    const written = this.#written(graph);
    const kept = written.filter(({ type }) => this.#onDevice && type.startsWith("float"));
    const preferredOutputLocation = Object.fromEntries(kept.map(({ next }) => [next, "gpu-buffer"]));
    const options = { ...(kept.length && { preferredOutputLocation }), ...this.#sessionOptions };
    const bytes = await this.#read(files[graph]);
    const session = await this.#ort.InferenceSession.create(bytes, options).catch((error) => {
      const least = `ONNX Runtime ${runtime.onnxruntime} or newer`;
      throw new GraphoptError(`${files[graph]}: expected a graph for ${least}, found: ${oneLine(error)}`);
    });
    const { feeds, state, hyperparameters, reports } = graphs[graph];
    const inputs = [...feeds, ...state, ...hyperparameters].filter((name) => !session.inputNames.includes(name));
    const outputs = [...reports, ...written.map(({ next }) => next)];
    const missing = [...inputs, ...outputs.filter((name) => !session.outputNames.includes(name))];
    if (!missing.length) return session;
    await session.release();
    const what = `expected ${inputs.length ? "a plain input" : "an output"} '${missing[0]}', found none`;
    throw new GraphoptError(`${files[graph]}: ${what}: write the folder again with graphopt.export_hosts`);
  }

  /** Return the state that a graph replaces. */
  #written(graph) {
    return graph.startsWith("train") ? this.#host.state : [];
  }

  /** Run a graph, keep the state that it returns, and return what it reports. */
  async #run(graph, feeds) {
    const session = await this.#session(graph);
    const { state, hyperparameters, reports } = this.#host.graphs[graph];
    const written = this.#written(graph);
    const read = (written.length && this.#options.report) || reports;
    for (const name of state) feeds[name] = this.#state[name];
    for (const name of hyperparameters) feeds[name] = this.#hyperparameters[name];
    const found = await session.run(feeds, [...read, ...written.map(({ next }) => next)]);
    for (const { name, next } of written) {
      this.#state[name].dispose();
      this.#state[name] = found[next];
    }
    return Object.fromEntries(read.map((name) => [name, valueOf(found[name])]));
  }

  /** Return what a graph is fed, as tensors that fit. */
  #tensors(graph, feeds) {
    for (const name of Object.keys(feeds)) named(this.#host.feeds, name, "feed");
    const sizes = {};
    const tensors = (this.#host.graphs[graph]?.feeds ?? []).map((name) => {
      const feed = this.#host.feeds.find((x) => x.name === name);
      const found = Object.keys(feeds).join(", ") || "nothing";
      if (feeds[name] === undefined) throw new GraphoptError(`feed '${name}': missing; found ${found}`);
      const tensor = this.#tensor(feed, feeds[name]);
      checkShape(feed, tensor.dims, sizes);
      checkLabels(feed, tensor);
      return [name, tensor];
    });
    return Object.fromEntries(tensors);
  }

  #tensor({ name, type, shape }, fed) {
    const numbers = Array.isArray(fed) && takesNumbers(type);
    const found = fed instanceof this.#ort.Tensor ? fed.type : numbers ? type : fed?.constructor?.name;
    const expected = TYPES[type][1].name;
    if (found !== type && found !== expected)
      throw new GraphoptError(`feed '${name}': expected ${type} (${expected}), found ${found}: convert it`);
    if (fed instanceof this.#ort.Tensor) return fed;
    const data = numbers ? arrayOf(type, fed.flat(Infinity)) : fed;
    const dims = dimsFor(shape, data.length);
    if (!dims)
      throw new GraphoptError(`feed '${name}': expected [${shape}], found ${data.length} numbers: pass an ort.Tensor`);
    return new this.#ort.Tensor(type, data, dims);
  }

  /** Return how many batches, from the first, run in one call: those of one shape in the host's memory. */
  #alike(batches) {
    const shapeOf = (tensors) => JSON.stringify(Object.values(tensors).map(({ dims }) => dims));
    const stacks = (x) =>
      Object.values(x).every(({ location }) => location === "cpu") && shapeOf(x) === shapeOf(batches[0]);
    const most = this.#host.graphs.train_steps && !this.#onDevice ? this.#options.stepsPerCall : 1;
    const other = batches.slice(0, most).findIndex((tensors) => !stacks(tensors));
    return other < 0 ? Math.min(most, batches.length) : Math.max(1, other);
  }

  #stacked(batches) {
    const stacked = Object.entries(batches[0]).map(([name, { type, dims, size }]) => {
      const data = new TYPES[type][1](size * batches.length);
      batches.forEach((tensors, i) => data.set(tensors[name].data, i * size));
      return [name, new this.#ort.Tensor(type, data, [batches.length, ...dims])];
    });
    return Object.fromEntries(stacked);
  }

  #unstacked(reports, count) {
    const rowOf = ({ type, data, dims }, i) => {
      const length = data.length / count;
      return valueOf(new this.#ort.Tensor(type, data.slice(i * length, (i + 1) * length), dims.slice(1)));
    };
    const entries = Object.entries(reports);
    return Array.from({ length: count }, (_, i) => Object.fromEntries(entries.map(([name, x]) => [name, rowOf(x, i)])));
  }

  /** Replace the state by that of a checkpoint, whose tensors may stand in another order and beside metadata. */
  #restore(bytes) {
    const [header, begin] = headerOf(bytes);
    const tensors = this.#host.state.map(({ name, type, shape }) => {
      const [expected, Numbers] = TYPES[type];
      const { dtype, shape: dims, data_offsets: ends } = header[name] ?? {};
      if (!dtype) throw new GraphoptError(`checkpoint: expected state '${name}', found none: ${OTHER_STEP}`);
      const found = `expected ${expected} [${shape}], found ${dtype} [${dims}]`;
      if (dtype !== expected || String(dims) !== String(shape))
        throw new GraphoptError(`checkpoint: state '${name}': ${found}: ${OTHER_STEP}`);
      const data = bytes.slice(begin + ends[0], begin + ends[1]).buffer;
      if (data.byteLength !== sizeOf(shape) * Numbers.BYTES_PER_ELEMENT)
        throw new GraphoptError(
          `checkpoint: expected ${begin + ends[1]} bytes or more, found ${bytes.length}: it is cut`,
        );
      return [name, new this.#ort.Tensor(type, new Numbers(data), shape)];
    });
    const other = Object.keys(header).find((name) => name !== "__metadata__" && !tensors.some((x) => x[0] === name));
    if (other) throw new GraphoptError(`checkpoint: expected no state '${other}', found it: ${OTHER_STEP}`);
    for (const tensor of Object.values(this.#state)) tensor.dispose();
    this.#state = Object.fromEntries(tensors);
  }
}

function reader(files) {
  if (typeof files !== "string" && !(files instanceof URL))
    return async (name) => asBytes(await (typeof files === "function" ? files(name) : files[name]), name);
  return async (name) => {
    const response = await fetch(`${String(files).replace(/\/$/, "")}/${name}`);
    if (response.ok) return new Uint8Array(await response.arrayBuffer());
    throw new GraphoptError(`${response.url}: expected a file of a host folder, found status ${response.status}`);
  };
}
