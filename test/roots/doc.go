// Package roots tests the packages that are not Debian's in roots of their own, under the shell of their system. Each
// test copies a root that roots.sh has made, adds the packages, and runs a script of testdata in it, with namespaces of
// its own and without an init system as the first process.
//
//   - rpm.sh has rpm install, upgrade and remove the package. TestPackages of test/vm does so while systemd runs.
//   - alpine.sh has OpenRC run the service, and busybox run the scripts. The program apk is not in Debian: the script unpacks
//     the package, and runs its scripts when apk does.
//   - openwrt.sh has busybox run the scripts. Neither opkg nor procd is in Debian: the script unpacks the package, and
//     rc.common is a small one that records what procd would do.
//
// "make test-packages" builds the packages and the roots, and runs the tests.
package roots
