package config_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"shaperd.dev/shaperd/shaper/config"
)

func write(text string) (path string, remove func(), err error) {
	folder, err := os.MkdirTemp("", "shaperd")
	if err != nil {
		return "", nil, err
	}
	path = filepath.Join(folder, "shaperd.toml")
	return path, func() { os.RemoveAll(folder) }, os.WriteFile(path, []byte(text), 0o644)
}

func ExampleLoad() {
	path, remove, err := write(`
[[listen]]
name       = "db"
address    = "tcp://127.0.0.1:5432"
downstream = "10.0.0.5:5432"

[[limit]]
name = "per-source"
key  = "source"
rate = "10Mbit/s"
`)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer remove()
	c, err := config.Load(path)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, l := range c.Limits {
		fmt.Printf("%s: %s for each %v\n", l.Name, config.FormatRate(l.Rate), l.Key)
	}
	// Output:
	// per-source: 10Mbit/s for each source
}

// All mistakes are reported at once, each with its position.
func ExampleErrors() {
	path, remove, err := write(`
[[listen]]
name       = "db"
address    = "tcp://127.0.0.1:5432"
downstream = "10.0.0.5:5432"

[[limit]]
name = "per-source"
key  = "sauce"
rate = "10Mbps"
`)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer remove()
	_, err = config.Load(path)
	var all config.Errors
	if errors.As(err, &all) {
		for _, e := range all {
			fmt.Printf("line %d, column %d: %s\n", e.Line, e.Column, e.Msg)
		}
	}
	// Output:
	// line 9, column 1: key: must be "source", "asn", "port", "listen", "connection", "attach", "destination", "downstream", "country" or "tlv:0xE0", not "sauce"; did you mean "source"?
	// line 10, column 1: rate: "10Mbps" is in bytes to tc and in bits to most people: write "10Mbit/s" or "10MB/s"
}
