//go:build linux

// Command shaperd limits traffic to a fragile server to what the server can
// handle.
package main

import (
	"os"

	"shaperd.dev/shaperd/internal/cli"
)

// version is set by the linker.
var version = "devel"

func main() { os.Exit(cli.Run(os.Args[1:], version)) }
