//go:build !(amd64 || arm64 || loong64 || mips64le || ppc64le || riscv64)

package bpf

import _ "embed"

// The programs share words of 64 bits with the daemon, and read packets as a little-endian
// processor does. There is no such file: unlike an undefined name, that ends a build before
// anything else is found wrong.
//
//go:embed shaperd-needs-a-64-bit-little-endian-processor
var _ string
