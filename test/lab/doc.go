// Package lab is shared by the programs and tests that drive shaperd from outside:
// network namespaces as hosts, links between them, packet captures, and the figures
// computed from arrivals.
//
// Everything it creates carries the ID of the creating process in its name, so that
// [Sweep] finds the leftovers of a crashed process. All of it needs root.
package lab
