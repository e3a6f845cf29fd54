// Package from runs the configurations of the pages in docs/from side by side: that of another program with the real
// program, and that of shaperd with the built binary, under the same load between three network namespaces. What a page
// says is the same in both is checked for both, and each difference that it names is checked too.
//
// The tests need root, bin/shaperd, and the programs that scripts/install-peers installs: "make test-from".
package from
