// What the attention of one trained model does on a text.

import { count, data, digits, grouped, h, isNumber, mean, page, section } from "./core.js";
import { armStyle } from "./colours.js";
import { extent, isWide, Plot } from "./plot.js";
import { Figure } from "./figure.js";
import { drawMap, drawShades, tokenLabel, visibleText } from "./heatmap.js";
import { layerAxis, QUANTITIES } from "./quantities.js";
import { makeTable } from "./table.js";
import { startPage } from "./theme.js";

const { diagnostics, layers, provenance, tokens } = data, shown = tokens.slice(0, 48), LEAST = 1e-4;
const head = data.heads === "heads" ? "head" : "softmax", layerCount = diagnostics.entropy.length;
page.names = () => [data.model];
const meanOrNull = (values) => (values.some(isNumber) ? mean(values.filter(isNumber)) : null);
const DIVERGED = "Not finite: the model has diverged.";

// the mean over heads large, with the tokens beside it, and every head small, to its right where there is room
function drawLayer(layer, width) {
  const isBig = isWide(width), gutter = isBig ? 96 : 0, top = 22;
  const size = Math.floor(isBig ? Math.min(500, 0.5 * width) : Math.min(420, width - 4)), cell = size / shown.length;
  const [left, under] = isBig ? [gutter + size + 28, top - 20] : [0, top + size + 8], room = width - left - 4;
  const perRow = Math.max(2, Math.ceil(isBig ? Math.sqrt(layer.heads) : room / 180));
  const small = Math.floor(Math.min(200, room / perRow - 8)), line = small + 28;
  const below = Math.max(top + size + (isBig ? 92 : 0), under + line * Math.ceil(layer.heads / perRow) + 8);
  const plot = new Plot(width, below + 40, { left: gutter, top, title: `Attention of layer ${layer.index + 1}` });
  const soft = { fill: plot.colours.soft, "font-size": 12.5, "text-anchor": "start" };
  plot.text(gutter, 14, `mean of ${layer.heads} ${data.heads}`, soft);
  drawMap(plot, layer.maps[0], { x: gutter, y: top, size, tokens: shown, title: `layer ${layer.index + 1}` });
  const style = { "font-size": Math.min(12, 0.92 * cell).toFixed(1), "text-anchor": "end" };
  for (const [i, token] of isBig ? shown.entries() : []) {
    const middle = (i + 0.5) * cell + 4, [x, y] = [gutter + middle, top + size + 8];
    plot.text(gutter - 6, top + middle, tokenLabel(token), style);
    plot.text(x, y, tokenLabel(token), { ...style, transform: `rotate(-90 ${x.toFixed(1)} ${y})` });
  }
  for (const k of count(layer.heads)) {
    const x = left + (k % perRow) * (small + 8), y = under + Math.floor(k / perRow) * line, name = `${head} ${k + 1}`;
    plot.text(x, y + 12, name, soft);
    const title = `layer ${layer.index + 1}, ${name}`;
    drawMap(plot, layer.maps[k + 1], { x, y: y + 20, size: small, tokens: shown, title });
  }
  drawShades(plot, gutter + 4, below, 160);
  return plot;
}
function mapFigure(layer) {
  const single = data.heads === "heads" ? "" : " Each softmax by itself, before the subtraction.";
  const caption = `Rows are queries, columns keys; the shade grows with the square root of the weight.${single}`;
  return new Figure(`layer-${layer.index + 1}`, {
    title: `Attention of layer ${layer.index + 1}`,
    heading: `Layer ${layer.index + 1} of ${layerCount}, the ${layer.place}`,
    caption: () => caption,
    draw: (_, width) => drawLayer(layer, width),
  });
}

// a dot for every head of a layer, and a line through the means
function drawByLayer(width, table, { title, label, limit }) {
  const domain = extent(table.flat(), { pad: 0.06, include: [0, ...(limit ? [limit.value] : [])] });
  if (!table.flat().some(isNumber)) return DIVERGED;
  const plot = new Plot(width, 280, { x: layerAxis(layerCount, width), y: { domain, label }, title }),
    { colour } = armStyle(1);
  plot.line(table.map((row, k) => [k + 1, meanOrNull(row)]), { colour, width: 2.4 });
  if (limit) {
    plot.line([[0.6, limit.value], [layerCount + 0.4, limit.value]], { colour: armStyle(2).colour, dash: "5 4" });
    plot.text(plot.end, plot.y(limit.value) - 5, limit.name, { "font-size": 11.5, "text-anchor": "end" });
  }
  table.forEach((row, k) =>
    row.forEach((value, i) => {
      if (!isNumber(value)) return;
      const px = plot.x(k + 1 + (0.4 * (i + 0.5)) / row.length - 0.2), name = `layer ${k + 1}, ${head} ${i + 1}`;
      plot.mark(px, plot.y(value), { colour, marker: 0 }, { r: 3, opacity: 0.6 });
      plot.hit(px, plot.y(value), name, () => [digits(value, 4)]);
    })
  );
  return plot;
}
function headFigure(name, limit = null) {
  const { title, label, caption } = QUANTITIES[name];
  const draw = (_, width) => drawByLayer(width, diagnostics[name], { title, label, limit });
  return new Figure(name, { title, heading: title, caption: () => caption, draw });
}
function drawSpectrum(_, width) {
  const rank = data.singular_values[0][0].length, title = "Singular values of the scores";
  const curves = layers.map(({ index, place }, i) => ({
    name: `layer ${index + 1}, the ${place}`,
    style: armStyle(i + 1),
    points: count(rank).map((k) => [k + 1, meanOrNull(data.singular_values[index].map((own) => own[k]))]),
  }));
  if (!curves.some(({ points }) => points.some(([, value]) => isNumber(value)))) return DIVERGED;
  const x = { domain: [0.5, rank + 0.5], label: "number i", format: String };
  const y = { domain: [LEAST, 1], log: true, label: `σᵢ/σ₁, mean over ${data.heads}` };
  const plot = new Plot(width, 280, { x, y, title });
  curves.forEach(({ name, style, points }, i) => {
    const own = points.map(([k, value]) => [k, isNumber(value) ? Math.max(LEAST, value) : null]);
    plot.line(own, { colour: style.colour, dash: style.dash, width: 2.2 });
    plot.text(plot.end - 4, plot.top + 14 + 17 * i, name, {
      fill: style.colour,
      "font-size": 12,
      "text-anchor": "end",
    });
    for (const [k, value] of own) {
      if (isNumber(value)) plot.hit(plot.x(k), plot.y(value), name, () => [`σ${k}/σ1 ${digits(value, 3)}`]);
    }
  });
  return plot;
}

section(
  "text",
  "The text",
  data.notes.map((note) => h("p", { class: "note" }, note)),
  h("pre", {}, visibleText(data.text)),
);
section("maps", "Attention", layers.map((layer) => mapFigure(layer).element));
const quantities = [
  headFigure("entropy", { value: data.largest_entropy, name: "uniform attention" }),
  headFigure("sink_mass"),
  headFigure("effective_rank"),
  new Figure("spectrum", {
    title: "Singular values of the scores",
    heading: "Singular values",
    caption: () => "Of the scores of the layers above, against the largest.",
    draw: drawSpectrum,
  }),
];
section("quantities", "By layer", h("div", { class: "pair" }, quantities.map((figure) => figure.element)));
const names = Object.keys(diagnostics).filter((name) => diagnostics[name].flat().some(isNumber));
const means = count(layerCount).map((k) => ({
  name: `layer ${k + 1}`,
  text: (name) => digits(meanOrNull(diagnostics[name][k])),
}));
const lead = `Mean over ${data.heads}; one number per layer and ${head} is in inspect.json beside this page.`;
section(
  "numbers",
  "Every quantity",
  makeTable(
    "quantities",
    [{ name: "", csv: "quantity", text: (name) => name.replaceAll("_", " "), isHead: true }, ...means],
    names,
    { lead },
  ),
);
const facts = [
  { name: "", csv: "what", text: ([name]) => name.replaceAll("_", " "), isHead: true },
  { name: "", csv: "value", kind: "code wrap", text: ([, value]) => String(value ?? "none") },
];
section("provenance", "Where it comes from", makeTable("facts", facts, Object.entries(provenance)));
startPage({
  title: data.model,
  meta: `${grouped(data.parameters)} parameters, after ${grouped(provenance.step)} steps on ${provenance.corpus}; ` +
    `measured on ${tokens.length} tokens`,
  foot: "The file is complete in itself and asks nothing of any network.",
});
