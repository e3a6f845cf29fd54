package main

import "shaperd.dev/shaperd/test/lab/plot"

// svgStyle is the style of all pictures. It uses the colors of the page.
const svgStyle = plot.Style + `
.fig text { font-size: 11.5px; }
.fig .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
.fig .ours { fill: var(--ours); }
.fig .better { fill: var(--good); } .fig .worse { fill: var(--bad); } .fig .theirs { fill: var(--theirs); }
`

// pictureWidth is the width of all pictures in pixels: it fits the screen of a phone.
const pictureWidth = 360.0
