"""What paired runs say: differences over seeds, equivalence, spread, power, curves. Needs scipy."""
