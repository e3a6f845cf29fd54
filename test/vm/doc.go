// Package vm runs tests inside the kernels that Debian 12 has, in virtual
// machines: what the packet plane needs of a kernel differs from one to the next,
// and the one that the tests start on may have none of it.
//
// A kernel boots in qemu with neither a disk nor acceleration, from an image that
// holds a few tools, the modules, the daemon that "make build" builds, and test
// binaries. The image is made anew each time. The guest runs the binaries one after
// the other and powers off; their tests become subtests here:
//
//	TestKernels/6.12/guest/TestIFB
//
// To have the tests of another package run, add it to the table called suites. A
// file that has the build tag vmguest is built for the guests alone. A guest has
// all that its tests need, and so a test that is skipped there counts as failed.
//
// The kernels are those that "make vm-kernels" puts into build/vm. To run some
// tests in one kernel:
//
//	go test ./test/vm -run TestKernels/6.12 -v -vm.run TestIFB
package vm
