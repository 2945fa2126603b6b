// What is chosen: a request, a replica, a tab, a tile. Kept in the address after '#', so that a link or a reload shows the same.

import { useEffect, useState } from "./vendor/htm/preact_standalone.js";

const KEPT = ["request", "replica", "tab", "tile"];

export function useSelection() {
  const [selection, setSelection] = useState(read);
  useEffect(() => {
    const follow = () => setSelection(read());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  const choose = (change) =>
    setSelection((before) => {
      const after = { ...before, ...change };
      const kept = KEPT.map((name) => [name, after[name]]).filter(([, value]) => value);
      history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
      return after;
    });
  return [selection, choose];
}

function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries(KEPT.map((name) => [name, given.get(name)]));
}
