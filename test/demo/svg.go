package main

import "shaperd.dev/shaperd/test/lab/plot"

// svgStyle is the style of all pictures, in the page and standalone. It follows the reader's color scheme.
const svgStyle = `
.fig { --ink: #1f2328; --soft: #656d76; --line: #d8dee4; --paper: #ffffff;
  --a: #2f6fdb; --b: #12a594; --g: #f0883e; --direct: #98a1ab; --shaped: #7a4fd0; }
@media (prefers-color-scheme: dark) {
  .fig { --ink: #e6edf3; --soft: #9198a1; --line: #30363d; --paper: #0d1117;
    --a: #6ea8fe; --b: #3dd6c0; --g: #e0763a; --direct: #6e7681; --shaped: #b292f0; } }` + plot.Style + `
.fig .title { font-size: 17px; font-weight: 650; fill: var(--ink); }
.fig .paper { fill: var(--paper); }
.fig .start { stroke: var(--soft); stroke-dasharray: 1 3; fill: none; }
.fig .halo { stroke: var(--paper); stroke-width: 4px; paint-order: stroke; stroke-linejoin: round; }
.fig .a { fill: var(--a); } .fig .b { fill: var(--b); } .fig .g { fill: var(--g); }
.fig .direct { fill: var(--direct); } .fig .shaped { fill: var(--shaped); }
`
