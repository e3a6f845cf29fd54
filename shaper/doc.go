// Package shaper decides what happens to traffic: which limits a flow is under,
// which bucket of each it falls into, and when a unit of it may leave.
//
// A [Limit] is what an operator writes. [Compile] turns a set of them into an
// immutable [Policy], and a [Shaper] holds the policy in force together with the
// buckets, which outlive policies. Time is an argument everywhere.
package shaper
