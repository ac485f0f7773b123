/** What a user can mend, in one line: the thing, what was expected, what was found, what to do. */
export class GraphoptError extends Error {
  name = "GraphoptError";
}

/** A step whose loss or new state is infinite or NaN. The state is as it was before the step. */
export class NonFiniteLoss extends GraphoptError {
  name = "NonFiniteLoss";

  constructor(message, step, reports) {
    super(message);
    this.step = step; // how many steps were done before it
    this.reports = reports; // what the step reported
    this.done = []; // what `run` had reported of the batches before
  }
}

/** Return what has a name. */
export function named(kind, name, known, advice = "") {
  if (Object.hasOwn(known, name)) return known[name];
  throw new GraphoptError(`${kind} '${name}': unknown; expected ${Object.keys(known).join(", ") || "none"}${advice}`);
}

/** Return an object of values by name, or raise an error. */
export function byNames(what, given, names) {
  const isObject = given && typeof given === "object" && !ArrayBuffer.isView(given) && !(Symbol.iterator in given);
  if (isObject && !["Promise", "Tensor"].includes(given.constructor?.name)) return given;
  throw new GraphoptError(`${what}: expected an object { ${names.join(", ")} }, found ${told(given)}`);
}

/** Describe a value in a few words. */
export function told(value) {
  if (ArrayBuffer.isView(value) || Array.isArray(value)) return `${value.constructor.name} of ${value.length}`;
  if (typeof value === "string") return `text '${value.slice(0, 40)}'`;
  if (typeof value === "function") return "a function";
  if (value instanceof Promise) return "a Promise: await it";
  if (value && typeof value === "object") return `an object of class ${value.constructor?.name ?? "null"}`;
  return value === undefined ? "nothing" : String(value);
}
