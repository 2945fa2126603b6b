// What is known of the chosen request, asked for anew when its row changes (it ends, say).

import { useLayoutEffect, useState } from "./vendor/htm/preact_standalone.js";
import { getJson } from "./connection.js";

// -> { body, keys, error, gone }: `body` is { row, page_keys, route }, `keys` the set of its page keys.
export function useDetails(rid, row) {
  const [known, setKnown] = useState({});
  useLayoutEffect(() => {
    if (!rid) {
      setKnown({});
      return undefined;
    }
    let stale = false;
    if (known.rid !== rid) setKnown({ rid });
    getJson(`api/requests/${encodeURIComponent(rid)}`).then(
      (body) => stale || setKnown({ rid, body, keys: new Set(body.page_keys ?? []) }),
      (error) => stale || setKnown((before) => ({ rid, body: before.body, keys: before.keys, error: error.message, gone: error.status === 404 })),
    );
    return () => {
      stale = true;
    };
  }, [rid, row]);
  return known.rid === rid ? known : {};
}
