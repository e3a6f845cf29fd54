package main

import "shaperd.dev/shaperd/test/lab/plot"

// svgStyle is the style of all pictures, in the page and standalone.
const svgStyle = plot.Theme + `
.fig { --direct: #98a1ab; --shaped: #7a4fd0; }
@media (prefers-color-scheme: dark) { .fig { --direct: #6e7681; --shaped: #b292f0; } }
.fig .start { stroke: var(--soft); stroke-dasharray: 1 3; fill: none; }
.fig .direct { fill: var(--direct); } .fig .shaped { fill: var(--shaped); }
`
