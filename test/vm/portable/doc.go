// Package portable tests the built program on a processor that the host does not have. Its tests are built with the
// tag vmguest and run inside a guest.
package portable
