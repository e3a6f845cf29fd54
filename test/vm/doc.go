// Package vm runs tests inside the kernels of Debian 12, in virtual machines: kernels
// differ in the features that the packet plane needs, and the host's kernel may lack all
// of them.
//
// A kernel boots in qemu with neither a disk nor acceleration, from an image that holds a
// few tools, the modules, the daemon built by "make build", and test binaries. The image
// is built for each run. The guest runs the binaries one after the other and powers off;
// their tests become subtests here:
//
//	TestKernels/6.12/guest/TestIFB
//
// To run the tests of another package, add it to suites. A file with the build tag
// vmguest is built for the guests only. A guest has everything that its tests need, so a
// test that is skipped there counts as failed.
//
// Emulation is slow: each kernel runs a part of the tests, or all with -vm.all.
//
// "make vm-kernels" downloads the kernels to build/vm. To run some tests in one kernel:
//
//	go test ./test/vm -run TestKernels/6.12 -v -vm.run TestIFB
//
// TestPackages boots Debian 12 and 13 from a disk with systemd as their first process, and installs, upgrades and
// removes the Debian package there, and in Debian 13 the rpm package: package installed. TestProcessors runs the program of each other processor:
// package portable. "make test-packages" runs both, and debian.sh and processors.sh fetch what they boot.
package vm
