package main

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// The commands that alerts tell of are understood.
func TestCommandsOfAlerts(t *testing.T) {
	text, err := os.ReadFile("../../configs/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	told := regexp.MustCompile(`"shaperd ([^"]*)"`).FindAllStringSubmatch(regexp.MustCompile(`\{\{.*?\}\}`).ReplaceAllString(string(text), "x"), -1)
	if len(told) < 10 {
		t.Fatalf("only %d commands", len(told))
	}
	for _, m := range told {
		if _, _, err := command(t, append(strings.Fields(m[1]), "--help")...); err != nil {
			t.Errorf("shaperd %s: %v", m[1], err)
		}
	}
}
