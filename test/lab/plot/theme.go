package plot

// Theme is the style of pictures that may stand alone: it brings its colors, which follow the
// reader's color scheme. The classes of areas are first, second and third.
const Theme = `
.fig { --ink: #1f2328; --soft: #656d76; --line: #d8dee4; --paper: #ffffff;
  --first: #2f6fdb; --second: #12a594; --third: #f0883e; }
@media (prefers-color-scheme: dark) {
  .fig { --ink: #e6edf3; --soft: #9198a1; --line: #30363d; --paper: #0d1117;
    --first: #6ea8fe; --second: #3dd6c0; --third: #e0763a; } }` + Style + `
.fig .title { font-size: 17px; font-weight: 650; fill: var(--ink); }
.fig .paper { fill: var(--paper); }
.fig .halo { stroke: var(--paper); stroke-width: 4px; paint-order: stroke; stroke-linejoin: round; }
.fig .first { fill: var(--first); } .fig .second { fill: var(--second); } .fig .third { fill: var(--third); }
`
