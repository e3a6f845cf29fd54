package cli

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func manCommand(e env) *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:     "man --dir DIRECTORY",
		Short:   "Write the manual pages",
		Long:    `Write a manual page for each command to a directory, dated by SOURCE_DATE_EPOCH.`,
		Example: `  shaperd man --dir /usr/share/man/man8`,
		Hidden:  true, // for "make install"
		Args:    noArgs("; use --dir to name the directory"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return usageError{fmt.Errorf("man requires --dir DIRECTORY")}
			}
			date, err := manDate()
			if err != nil {
				return err
			}
			return writeMan(cmd.Root(), dir, date)
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "existing `directory`")
	return cmd
}

// manDate returns the date of the pages, for reproducible builds that of the source.
func manDate() (string, error) {
	t := time.Now()
	if s := os.Getenv("SOURCE_DATE_EPOCH"); s != "" {
		epoch, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return "", usageError{fmt.Errorf("SOURCE_DATE_EPOCH %q: must be seconds since 1970", s)}
		}
		t = time.Unix(epoch, 0)
	}
	return t.UTC().Format("January 2, 2006"), nil
}

// writeMan writes the pages of cmd and its subcommands.
func writeMan(cmd *cobra.Command, dir, date string) error {
	if cmd.Hidden || cmd.Name() == "help" {
		return nil
	}
	var b strings.Builder
	manPage(&b, cmd, date)
	path := filepath.Join(dir, manName(cmd)+".8")
	if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
		return err
	}
	for _, sub := range cmd.Commands() {
		if err := writeMan(sub, dir, date); err != nil {
			return err
		}
	}
	return nil
}

func manName(cmd *cobra.Command) string { return strings.ReplaceAll(cmd.CommandPath(), " ", "-") }

// manPage writes the page of cmd in mdoc(7).
func manPage(w io.Writer, cmd *cobra.Command, date string) {
	line := func(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }
	line(".Dd %s\n.Dt %s 8\n.Os shaperd", date, strings.ToUpper(manName(cmd)))
	line(".Sh NAME\n.Nm %s\n.Nd %s", manName(cmd), roff(strings.ToLower(cmd.Short[:1])+cmd.Short[1:]))
	line(".Sh SYNOPSIS")
	if cmd.HasSubCommands() && !cmd.HasParent() {
		line(".Nm shaperd\n.Ar command\n.Op Ar options")
	} else {
		line(".Nm %s", roff(cmd.CommandPath()))
		if _, args, ok := strings.Cut(cmd.Use, " "); ok {
			line("%s", roff(args))
		}
		if cmd.HasAvailableLocalFlags() {
			line(".Op Ar options")
		}
	}
	line(".Sh DESCRIPTION\n%s", paragraphs(cmd.Long))
	if subs := cmd.Commands(); len(subs) > 0 {
		line(".Bl -tag -width Ds")
		for _, sub := range subs {
			if !sub.Hidden && sub.Name() != "help" {
				line(".It Xr %s 8\n%s.", manName(sub), roff(sub.Short))
			}
		}
		line(".El")
		if cmd.HasParent() && !cmd.HasAvailableLocalFlags() {
			line(".Pp")
		}
	}
	if cmd.HasParent() && cmd.HasAvailableLocalFlags() {
		line(".Sh OPTIONS\n.Bl -tag -width Ds")
		manFlags(w, cmd.LocalFlags())
		line(".El\n.Pp")
	}
	if !cmd.HasParent() {
		manRoot(w, cmd)
	} else {
		line("For common options, exit codes and files see\n.Xr shaperd 8 .")
	}
	if cmd.Example != "" {
		line(".Sh EXAMPLES\n.Bd -literal")
		for example := range strings.Lines(cmd.Example) {
			line("%s", roff(strings.TrimSpace(example)))
		}
		line(".Ed")
	}
	if cmd.HasParent() {
		line(".Sh SEE ALSO\n.Xr %s 8", manName(cmd.Parent()))
	}
}

// manRoot writes the sections that apply to all verbs.
func manRoot(w io.Writer, root *cobra.Command) {
	fmt.Fprintln(w, ".Sh OPTIONS\nFor all commands that query a daemon:\n.Bl -tag -width Ds")
	manFlags(w, root.PersistentFlags())
	fmt.Fprintln(w, `.El
.Sh ENVIRONMENT
.Bl -tag -width Ds
.It Ev SHAPERD_CONTROL
Control socket of the daemon, if
.Fl -control
is absent.
.It Ev NO_COLOR
Disables colors when it is not empty.
.El
.Sh FILES
.Bl -tag -width Ds
.It Pa /etc/shaperd/shaperd.toml
The configuration.
The daemon also reads the files in the directory
.Pa conf.d
next to it.
.It Pa /run/shaperd/control.sock
The control socket.
.El
.Sh EXIT STATUS
0 on success, 1 on a failure, 2 on an invalid command line, 3 when no daemon
answers.`)
}

func manFlags(w io.Writer, flags *pflag.FlagSet) {
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		name, usage := pflag.UnquoteUsage(f)
		short := ""
		if f.Shorthand != "" {
			short = fmt.Sprintf(", Fl %s", f.Shorthand)
		}
		fmt.Fprintf(w, ".It Fl -%s%s", f.Name, short)
		if name != "" {
			fmt.Fprintf(w, " Ar %s", roff(name))
		}
		fmt.Fprintf(w, "\n%s", roff(strings.ToUpper(usage[:1])+usage[1:]))
		if f.DefValue != "" && f.DefValue != "false" {
			fmt.Fprintf(w, "; the default is %s", roff(f.DefValue))
		}
		fmt.Fprintln(w, ".")
	})
}

// sentence matches the end of a sentence and the start of the next.
var sentence = regexp.MustCompile(`([.?!])\s+([A-Z])`)

// paragraphs formats text with empty lines between paragraphs, one sentence per line.
func paragraphs(s string) string {
	var out []string
	for paragraph := range strings.SplitSeq(s, "\n\n") {
		out = append(out, roff(sentence.ReplaceAllString(paragraph, "$1\n$2")))
	}
	return strings.Join(out, "\n.Pp\n")
}

// roff escapes backslashes, dashes, which must stay ASCII, and control characters at the start
// of a line.
func roff(s string) string {
	s = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(s)
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
			lines[i] = `\&` + line
		}
	}
	return strings.Join(lines, "\n")
}
