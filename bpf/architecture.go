//go:build !(amd64 || arm64 || loong64 || mips64le || ppc64le || riscv64)

package bpf

// The programs share words of 64 bits with the daemon, and read packets as a little-endian
// processor does.
var _ = shaperd_needs_a_64_bit_little_endian_processor
