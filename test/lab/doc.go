// Package lab has what the programs and tests that drive shaperd from outside share:
// hosts that are network namespaces, cables between them, captures at their
// interfaces, and the figures that arrivals come to.
//
// What it makes bears the id of the process that made it, so that [Sweep] finds
// what a crashed one left behind. All of it needs root.
package lab
