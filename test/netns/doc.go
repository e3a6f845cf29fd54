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
// Each host is a network namespace that the test makes and removes. What a test
// says about smoothness it reads from the kernel's timestamps of the frames that
// arrive at the interface named in, not from what a program noticed.
//
// The tests need root and a built binary: the file that SHAPERD_BIN names, or
// bin/shaperd at the top of the repository. Nothing here imports the daemon's
// packages. Tests of what this machine's kernel may not have run in the guests of
// package vm.
//
// With -figures, the test of that name measures for ten seconds a case, and
// prints what it finds:
//
//	go test ./test/netns -run Figures -figures -v
//
// The story in docs/story.md comes from:
//
//	go test ./test/netns -run Story -figures -v
package netns
