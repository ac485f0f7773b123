import type { InferenceSession, Tensor, TensorConstructor, InferenceSessionFactory } from "onnxruntime-common";

/** ONNX Runtime: what `import * as ort from "onnxruntime-node"`, `"onnxruntime-web"` or `"onnxruntime-web/webgpu"` gives. */
export interface Runtime {
  Tensor: TensorConstructor;
  InferenceSession: InferenceSessionFactory;
}

/** A host folder: its files by name, a function that reads one by name, the URL of the folder, or in Node its path. */
export type Files =
  | Record<string, Uint8Array | ArrayBuffer>
  | ((name: string) => Uint8Array | ArrayBuffer | Promise<Uint8Array | ArrayBuffer>)
  | string
  | URL;

/** Options of ONNX Runtime's sessions, such as `executionProviders: ["webgpu"]`, and of this package. */
export interface Options extends InferenceSession.SessionOptions {
  /** The most steps that `run` does in one call of the runtime; 16 by default. With WebGPU it is always 1. */
  stepsPerCall?: number;
  /** What training steps report, by name; everything by default. Fewer reports are fewer copies. */
  report?: string[];
  /** What follows a step whose loss or new state is not finite: an error, by default, or nothing. The state stays. */
  onNonfinite?: "raise" | "skip";
}

export type NumberArray = Exclude<Tensor.DataType, string[]>;

interface Nested extends Array<number | bigint | Nested> {}

/**
 * A feed: a tensor; or numbers in any array, of which the shape follows from the arrays in it, or from their count if
 * host.json leaves one size open. Class numbers may be in any array of whole numbers.
 */
export type Feed = Tensor | NumberArray | Nested;

/** A batch by the names in host.json. */
export type Feeds = Record<string, Feed>;

/** What a graph reports, by name: scalars as numbers, others as tensors. */
export type Reports = Record<string, any>;

/** A value in host.json. */
export interface Description {
  name: string;
  role: string;
  type: string;
  shape: (number | string | null)[];
}

/** Numbers of a state in a file: places by strides, in the file from a byte and in the state from a number, times a factor. */
export interface Block {
  state: string;
  offset: number;
  shape: number[];
  strides: number[];
  first: number;
  state_strides: number[];
  factor: number;
}

/** The contract, host.json. */
export interface Host {
  format: "graphopt.host";
  version: 1;
  files: Record<string, string>;
  feeds: (Description & { labels?: [number, number] })[];
  state: (Description & { next: string; offset: number; bytes: number })[];
  hyperparameters: (Description & { default: any })[];
  reports: Description[];
  /** The output that is infinite or NaN if the loss or the new state is; older folders have none. */
  check?: string;
  /** By form and file, the blocks of the state that it has. */
  adapters?: Record<string, Record<string, Block[]>>;
  graphs: Record<string, { feeds: string[]; state: string[]; hyperparameters: string[]; reports: string[] }>;
}

/**
 * Report what a user can mend, in one line: the thing, what was expected, what was found, what to do.
 */
export class GraphoptError extends Error {}

/** Report a step whose loss or new state is infinite or NaN. The state is as it was before, and training can go on. */
export class NonFiniteLoss extends GraphoptError {
  /** How many steps were done before it. */
  step: number;
  /** What the step reported. */
  reports: Reports;
  /** What `run` had reported of the batches before: go on with `batches.slice(error.done.length + 1)`. */
  done: Reports[];
}

/** Hold a training graph with its state, and train it. Calls run one after the other, in the order they are made. */
export class Trainer {
  private constructor();

  /** Read a host folder, and open a session of its training graph. */
  static create(ort: Runtime, files: Files, options?: Options): Promise<Trainer>;

  /** The contract, host.json. */
  readonly host: Host;

  /**
   * What is known of each graph that is open: `proven`, `proven before` (on this device, by this runtime: the browser
   * remembers it), or `not proven: ` and the reason.
   */
  readonly proofs: Record<string, string>;

  /**
   * Do one training step on a batch, and return what it reports: `loss`, and what else the graph has. Throw
   * NonFiniteLoss, and keep the state, if the loss or the new state is not finite.
   */
  step(feeds: Feeds): Promise<Reports>;

  /** Do a step on each batch, several in one call of the runtime where that is faster; return what each reports. */
  run(batches: Feeds[]): Promise<Reports[]>;

  /** Return the losses, metrics and predictions of a batch in the inference form. The state stays as it is. */
  evaluate(feeds: Feeds): Promise<Reports>;

  /** Return the model's outputs in the inference form. */
  predict(feeds: Feeds): Promise<Reports>;

  /** Set hyperparameters for all later steps: `set({ learning_rate: 1e-4 })`. */
  set(values: Record<string, number | number[] | NumberArray | Tensor>): void;

  /** Return copies of the state by name: parameters, optimizer slots, statistics and counters. */
  state(): Promise<Record<string, NumberArray>>;

  /** Return the state as a checkpoint: the bytes of a safetensors file, which graphopt loads in Python too. */
  save(): Promise<Uint8Array>;

  /** Replace the state by that of a checkpoint. If the checkpoint does not fit, nothing is replaced. */
  load(checkpoint: Uint8Array | ArrayBuffer): Promise<void>;

  /** Return the trained model: `inference.onnx`, and `state.safetensors` and perhaps `weights.bin` with its weights. */
  trained(): Promise<Record<string, Uint8Array>>;

  /**
   * Return the trained adapter by the names of its files: `adapter.onnx_adapter` for ONNX Runtime and onnxruntime-genai,
   * or `adapter_config.json` and `adapter_model.safetensors` for PEFT.
   */
  adapter(form?: "onnxruntime" | "peft"): Promise<Record<string, Uint8Array>>;

  /** Give back the sessions, and the state on the device. */
  dispose(): Promise<void>;
}

/** Write bytes under a name to the browser's IndexedDB. */
export function saveToIndexedDB(name: string, bytes: Uint8Array): Promise<unknown>;

/** Return the bytes that IndexedDB has under a name; undefined where it has none. */
export function loadFromIndexedDB(name: string): Promise<Uint8Array | undefined>;

/** Write bytes to a file of the origin's private file system (OPFS). */
export function saveToOPFS(name: string, bytes: Uint8Array): Promise<void>;

/** Return the bytes of a file of the origin's private file system; undefined where there is none. */
export function loadFromOPFS(name: string): Promise<Uint8Array | undefined>;
