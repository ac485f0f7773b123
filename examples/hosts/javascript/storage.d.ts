/** Write bytes under a name to the browser's IndexedDB. */
export function saveToIndexedDB(name: string, bytes: Uint8Array): Promise<unknown>;

/** Return the bytes that IndexedDB has under a name; undefined where it has none. */
export function loadFromIndexedDB(name: string): Promise<Uint8Array | undefined>;

/** Write bytes to a file of the origin's private file system (OPFS). */
export function saveToOPFS(name: string, bytes: Uint8Array): Promise<void>;

/** Return the bytes of a file of the origin's private file system; undefined where there is none. */
export function loadFromOPFS(name: string): Promise<Uint8Array | undefined>;
