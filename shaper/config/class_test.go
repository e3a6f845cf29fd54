package config

import (
	"os"
	"strings"
	"testing"

	"shaperd.dev/shaperd/shaper"
)

// The example of docs/classes.md is a configuration, and means what the page says.
func TestLoad_DocumentedClasses(t *testing.T) {
	page, err := os.ReadFile("../../docs/classes.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "```toml\n")
	text, _, _ = strings.Cut(text, "```")
	c, err := load([]*file{newFile("classes.toml", 0, text)})
	if err != nil {
		t.Fatal(err)
	}
	compile(t, c)
	l := &c.Limits[0]
	if len(c.Classes) != 2 || c.Classes[0].Weight != 10 || c.Classes[0].Priority != 10 || c.Classes[1].Weight != 1 || c.Classes[1].Priority != 0 {
		t.Errorf("classes are %+v", c.Classes)
	}
	if l.ReservedFor("batch") != 10 || l.ReservedFor(shaper.DefaultClass) != 0 || len(l.Turns) != 2 {
		t.Errorf("limit is %+v", l)
	}
	if got, want := c.Summary(l), "80Mbit/s, queue 200ms, 100 connections, wait 2s, turns by prefix24, source, reserved: batch 10%"; got != want {
		t.Errorf("summary is %q, want %q", got, want)
	}
}
