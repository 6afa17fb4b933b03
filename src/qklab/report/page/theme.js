// What both pages do: the button for light and dark, drawing anew when the room or the light changes, printing.

import { keepState, root, state } from "./core.js";
import { isDark } from "./colours.js";
import { figures, hideTip, redraw } from "./figure.js";

// recolour(): whatever has colours beside the figures
export function startPage({ title, meta, foot, recolour = () => {} }) {
  const button = document.getElementById("theme");
  const texts = { title, meta, foot };
  for (const [id, text] of Object.entries(texts)) document.getElementById(id).textContent = text;
  const refresh = () => {
    root.style.colorScheme = state.theme || "";
    button.textContent = isDark() ? "Light" : "Dark";
    recolour();
    redraw();
  };
  button.addEventListener("click", () => {
    state.theme = isDark() ? "light" : "dark";
    keepState();
    refresh();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  refresh();
  let wait = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(wait);
    const hasChanged = ({ width, plotBox }) => width && Math.abs(plotBox.clientWidth - width) > 2;
    wait = requestAnimationFrame(() => figures.filter(hasChanged).forEach((figure) => figure.update()));
  }).observe(document.querySelector("main"));
  addEventListener("beforeprint", () => {
    root.dataset.printing = "";
    document.querySelectorAll("details").forEach((details) => details.fill?.());
    figures.forEach((figure) => {
      figure.isFresh = false;
      figure.render();
    });
  });
  addEventListener("afterprint", () => {
    delete root.dataset.printing;
    refresh();
  });
  addEventListener("scroll", hideTip, { passive: true });
}
