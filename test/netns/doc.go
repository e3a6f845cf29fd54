// Package netns tests the built shaperd binary from outside, between three hosts:
//
//	 client                       shaper                        downstream
//	+------------+   10.1.0.0/16 +-----------+  10.2.0.0/24  +------------+
//	| 10.1.1.10  | up       left |           | right      in |            |
//	| 10.1.2.10  +---------------+  shaperd  +---------------+  10.2.0.5  |
//	| 10.1.3.10  |      10.1.0.1 |           | 10.2.0.1      |            |
//	+------------+      10.1.0.2 +-----------+               +------------+
//	                fd00:1::/32                 fd00:2::/64
//
// Each host is a network namespace that the test creates and removes. Smoothness is
// measured by the kernel's timestamps of the frames that arrive at the interface in, not
// by a receiving program.
//
// The tests need root and a built binary: the file that SHAPERD_BIN names, or bin/shaperd
// in the root of the repository. Of the daemon's packages, only the client of its API is
// imported. Tests of features that this machine's kernel may lack run in the guests of
// package vm.
//
// The transcript in docs/walkthrough.md is produced by:
//
//	go test ./test/netns -run Walkthrough -figures -v
package netns
