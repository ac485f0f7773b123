/** Call the compiler. Only this file knows where it runs. */

import { safetensors } from "./files.js";

const token = location.hash.slice(1); // of graphopt serve

/**
 * Return the files of a host folder by name.
 *
 * @param {Uint8Array} model an ONNX file
 * @param {object} choice as graphopt.hosts.for_page.Choice has it
 * @param {AbortSignal} signal ends the compilation
 */
export async function compile(model, choice, signal) {
  if (!token) throw new Error("graphopt serve: expected the whole address that it printed, found one that ends before #");
  const headers = { authorization: `Bearer ${token}`, "graphopt-choice": JSON.stringify(choice) };
  const response = await fetch("/compile", { method: "POST", body: model, headers, signal }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Error("graphopt serve: expected it to run, found no answer: start it again, and open its address");
  });
  if (!response.ok) throw new Error((await response.text()).trim());
  const { entries, numbers } = safetensors(new Uint8Array(await response.arrayBuffer()));
  return Object.fromEntries(
    Object.entries(entries).map(([name, { data_offsets: [from, to] }]) => [name, numbers.slice(from, to)]),
  );
}
