/** Keep checkpoints in the browser: in IndexedDB, or in the origin's private file system (OPFS). */

export const saveToIndexedDB = (name, bytes) => inStore("readwrite", (store) => store.put(bytes, name));
export const loadFromIndexedDB = (name) => inStore("readonly", (store) => store.get(name));

export async function saveToOPFS(name, bytes) {
  const folder = await navigator.storage.getDirectory();
  const writable = await (await folder.getFileHandle(name, { create: true })).createWritable();
  await writable.write(bytes);
  await writable.close();
}

export async function loadFromOPFS(name) {
  const folder = await navigator.storage.getDirectory();
  const handle = await folder.getFileHandle(name).catch(() => undefined);
  return handle && new Uint8Array(await (await handle.getFile()).arrayBuffer());
}

async function inStore(mode, work) {
  const opening = indexedDB.open("graphopt", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("checkpoints");
  const database = await settled(opening);
  const store = database.transaction("checkpoints", mode).objectStore("checkpoints");
  return settled(work(store)).finally(() => database.close());
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
