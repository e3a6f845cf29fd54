// Package guest tests that the kernels of package vm have the required features. Its
// tests are built with the tag vmguest and run inside a guest.
package guest
