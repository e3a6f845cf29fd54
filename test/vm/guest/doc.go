// Package guest tests what the kernels of the package above it are to have. Its
// tests are built with the tag vmguest, and run inside a guest.
package guest
