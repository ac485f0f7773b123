/** Keep checkpoints in the browser: in IndexedDB, or in the origin's private file system (OPFS). */

/** Write bytes under a name to IndexedDB. */
export function saveToIndexedDB(name, bytes) {
  return inStore("readwrite", (store) => store.put(bytes, name));
}

/** Return the bytes that IndexedDB has under a name; undefined where it has none. */
export function loadFromIndexedDB(name) {
  return inStore("readonly", (store) => store.get(name));
}

/** Write bytes to a file of the origin's private file system. */
export async function saveToOPFS(name, bytes) {
  const folder = await navigator.storage.getDirectory();
  const writable = await (await folder.getFileHandle(name, { create: true })).createWritable();
  await writable.write(bytes);
  await writable.close();
}

/** Return the bytes of a file of the origin's private file system; undefined where there is none. */
export async function loadFromOPFS(name) {
  const folder = await navigator.storage.getDirectory();
  const handle = await folder.getFileHandle(name).catch(() => undefined);
  return handle && new Uint8Array(await (await handle.getFile()).arrayBuffer());
}

async function inStore(mode, work) {
  const opening = indexedDB.open("graphopt", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("checkpoints");
  const database = await settled(opening);
  try {
    return await settled(work(database.transaction("checkpoints", mode).objectStore("checkpoints")));
  } finally {
    database.close();
  }
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
