/** What the pages that train have in common: parts of the page by name, what it says, and files that it gives. */

export const at = (id) => document.getElementById(id);

export function say(what, kind = "") {
  Object.assign(at("status"), { className: kind, textContent: what });
}

export const fail = (error) => (error.name === "AbortError" ? say("Stopped.") : say(error.message, "error"));

/** Do something, and say what went wrong. */
export async function attempt(what) {
  try {
    await what();
  } catch (error) {
    fail(error);
  }
}

/** Download files: their bytes by name. */
export function give(files) {
  for (const [download, bytes] of Object.entries(files)) {
    const href = URL.createObjectURL(new Blob([bytes]));
    Object.assign(document.createElement("a"), { href, download }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10000);
  }
}
