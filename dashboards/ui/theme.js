// Light or dark as the viewer chose last, before anything is drawn. Not a module: a module would run after the first paint.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("manta-theme");
  } catch {
    // storage may be forbidden: then the system's theme it is
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
