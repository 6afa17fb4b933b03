// What is measured of attention, and how layers stand on an axis; the same on both pages.

import { count } from "./core.js";

export const QUANTITIES = {
  entropy: {
    title: "Entropy",
    label: "nats",
    caption: "How spread out attention is. 0: each query looks at one token; towards 0 it collapses.",
  },
  sink_mass: {
    title: "Sink mass",
    label: "share on the first token",
    caption: "How much attention is parked on the first token of the text. Near 1 a head does nothing.",
  },
  effective_rank: {
    title: "Effective rank",
    label: "effective rank of the scores",
    caption: "How many directions the scores of a head use.",
  },
};
export function layerAxis(layers, width) {
  const every = Math.ceil(layers / Math.max(2, Math.floor(width / 45)));
  const ticks = count(layers).filter((k) => k % every === 0).map((k) => k + 1);
  return { domain: [0.6, layers + 0.4], label: "layer", ticks, format: String };
}
