// Package installed tests the Debian package, and the rpm package, inside a Debian that has booted with systemd. Its tests
// are built with the tag vmguest. The subtests of a test are steps, each on top of those before it.
package installed
