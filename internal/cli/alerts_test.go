package cli

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestAlerts_CommandsAreValid checks that the commands in alerts exist.
func TestAlerts_CommandsAreValid(t *testing.T) {
	text, err := os.ReadFile("../../configs/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	commands := regexp.MustCompile(`"shaperd ([^"]*)"`).FindAllStringSubmatch(regexp.MustCompile(`\{\{.*?\}\}`).ReplaceAllString(string(text), "x"), -1)
	if len(commands) < 10 {
		t.Fatalf("only %d commands", len(commands))
	}
	for _, m := range commands {
		if _, _, err := command(t, append(strings.Fields(m[1]), "--help")...); err != nil {
			t.Errorf("shaperd %s: %v", m[1], err)
		}
	}
}
