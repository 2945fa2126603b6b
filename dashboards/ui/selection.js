// Which replica and request are chosen. Kept in the address after '#', so that a link or a reload shows the same.

import { useEffect, useState } from "./vendor/htm/preact_standalone.js";

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
      const kept = Object.entries(after).filter(([, value]) => value);
      history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
      return after;
    });
  return [selection, choose];
}

function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  return { replica: given.get("replica"), request: given.get("request") };
}
