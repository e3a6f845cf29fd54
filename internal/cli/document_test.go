package cli

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// The tables of docs/commands.md have every command, and no other. A command with subcommands that
// does nothing alone needs no line. The exceptions from --json are those of the code.
func TestDocument_ListsCommands(t *testing.T) {
	text, err := os.ReadFile("../../docs/commands.md")
	if err != nil {
		t.Fatal(err)
	}
	known, listed := map[string]*cobra.Command{}, map[string]bool{}
	var each func(*cobra.Command)
	each = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			if sub.Name() != "help" {
				known[strings.TrimPrefix(sub.CommandPath(), "shaperd ")] = sub
				each(sub)
			}
		}
	}
	each(rootCommand(env{flags: &rootFlags{}}))
	for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*) \\|").FindAllStringSubmatch(string(text), -1) {
		for _, span := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
			name, rest, _ := strings.Cut(span[1], " ")
			if sub, _, _ := strings.Cut(rest, " "); known[name+" "+sub] != nil {
				name += " " + sub
			}
			if known[name] == nil {
				t.Errorf("docs/commands.md lists %q, which is no command", span[1])
			}
			listed[name] = true
		}
	}
	var withoutJSON []string
	for name, cmd := range known {
		alone := !cmd.HasSubCommands() || cmd.Annotations[jsonAnnotation] != ""
		if !listed[name] && alone && !cmd.Hidden {
			t.Errorf("docs/commands.md does not list %q", name)
		}
		if !cmd.HasSubCommands() && !supportsJSON(cmd) {
			withoutJSON = append(withoutJSON, name)
		}
	}
	m := regexp.MustCompile("(?s)`--json`, except (.*?)\\.\n").FindStringSubmatch(string(text))
	if m == nil {
		t.Fatal("docs/commands.md does not say which commands have no --json")
	}
	exceptions := regexp.MustCompile("`([a-z]+)`").FindAllStringSubmatch(m[1], -1)
	var got []string
	for _, e := range exceptions {
		got = append(got, e[1])
	}
	slices.Sort(got)
	slices.Sort(withoutJSON)
	if !slices.Equal(got, withoutJSON) {
		t.Errorf("docs/commands.md excepts %q from --json, and the code %q", got, withoutJSON)
	}
}
