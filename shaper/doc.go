// Package shaper classifies traffic and decides on it: which limits a flow is under,
// which bucket of each limit it uses, and when a unit of it may leave.
//
// A [Limit] is a configured rule. [Shaper.Compile] turns a set of them into an
// immutable [Policy], and a [Shaper] holds the current policy together with the
// buckets, which outlive policies. Any number of goroutines may use both; the package
// starts none, and time is an argument everywhere.
package shaper
