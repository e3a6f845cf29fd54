package config

import (
	"path/filepath"
	"testing"
)

// A listener may forward to another one, and to an address that is only similar to its own.
func TestLoad_ForwardsWithoutLoop(t *testing.T) {
	for name, text := range map[string]string{
		"chain": `
			[[listen]]
			name = "a"
			address = ["tcp://0.0.0.0:7000", "udp://0.0.0.0:7001"]
			downstream = ["127.0.0.1:7002"]
			[[listen]]
			name = "b"
			address = ["tcp://0.0.0.0:7002", "udp://0.0.0.0:7003"]
			downstream = ["127.0.0.1:7001"]`,
		"another protocol": `
			[[listen]]
			name = "a"
			address = ["tcp://0.0.0.0:7000"]
			downstream = ["127.0.0.1:7001"]
			[[listen]]
			name = "b"
			address = ["udp://0.0.0.0:7001"]
			downstream = ["127.0.0.1:7000"]`,
		"another family": `
			[[listen]]
			name = "a"
			address = ["tcp://[::]:7000"]
			downstream = ["127.0.0.1:7000"]`,
		"other ports of ranges": `
			[[listen]]
			name = "a"
			address = ["tcp://127.0.0.1:7000-7010"]
			downstream = ["127.0.0.2"]
			[[listen]]
			name = "b"
			address = ["tcp://127.0.0.2:7005-7015"]
			downstream = ["127.0.0.3"]
			[[listen]]
			name = "c"
			address = ["tcp://127.0.0.3:7011-7020"]
			downstream = ["127.0.0.1"]`,
		"another loopback address": `
			[[listen]]
			name = "a"
			address = ["tcp://127.0.0.2:7000"]
			downstream = ["localhost:7000"]`,
		"transparent": `
			[[listen]]
			name = "a"
			address = ["tcp://192.0.2.1:7000"]
			downstream = ["192.0.2.1:7000"]
			transparent = true`,
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Load(filepath.Join(write(t, "shaperd.toml", text), "shaperd.toml")); err != nil {
				t.Error(err)
			}
		})
	}
}
