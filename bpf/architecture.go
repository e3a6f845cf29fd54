//go:build !(amd64 || arm64 || loong64 || mips64le || ppc64le || riscv64 || arm)

package bpf

import _ "embed"

// The programs share 64-bit words with the daemon, and assume a little-endian processor. 32-bit ARM
// is built for the proxy plane alone: see CheckProcessor. The embedded file does not exist: unlike an undefined name, this stops the build before
// any other error.
//
//go:embed shaperd-needs-a-64-bit-little-endian-processor
var _ string
