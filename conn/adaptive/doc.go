// Package adaptive finds how much a server bears: the smallest number of connections in flight with which it answers
// nearly as often as it ever does.
//
// A Controller compares the throughput at two neighboring limits, an eighth below and above the one it holds for
// right, measured one right after the other, and moves until the elasticity of throughput, d ln X / d ln N, is about 0.1:
// below that, more in flight only wait in the server; above, it has workers to spare. No latency is taken for the
// unloaded one, as congestion controls do (TCP Vegas, BBR, the gradients of Netflix and Envoy): such a base is measured
// wrong as soon as the server changes, and the limit then drifts with it.
//
// Only time counts in which somebody waits at the gate: then as many are in flight as the limit lets, and what comes
// back is what the server can do. Without demand nothing is learned, and nothing moves.
//
// The controller does no I/O and reads no clock.
package adaptive
