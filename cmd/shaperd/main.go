//go:build linux

// Command shaperd limits traffic to a fragile server to what the server can
// handle.
package main

import (
	"os"
	_ "time/tzdata" // schedules name time zones, which not every host has

	"shaperd.dev/shaperd/internal/cli"
)

// version is set by the linker.
var version = "devel"

func main() { os.Exit(cli.Run(os.Args[1:], version)) }
