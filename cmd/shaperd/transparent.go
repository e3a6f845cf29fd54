package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"shaperd/conn/divert"
	"shaperd/shaper/config"
)

// diversion is the rules that l's transparent listeners need.
func (l *loaded) diversion() divert.Rules {
	r := divert.Rules{Mark: uint32(l.config.Transparent.Mark)}
	for _, listen := range l.config.Listen {
		if !listen.Transparent {
			continue
		}
		for _, a := range listen.Addresses {
			announced := len(listen.AcceptProxyFrom) > 0 // sources of any family
			r.IPv4 = r.IPv4 || announced || a.Addr.Is4()
			r.IPv6 = r.IPv6 || announced || a.Addr.Is6()
			if !a.Addr.IsUnspecified() {
				r.Addresses = append(r.Addresses, divert.Address(a))
			}
		}
	}
	return r
}

// divert puts the rules that l needs in force, if the daemon is to see to them. was is
// what is in force, or nil. Connections of listeners that are transparent no more go on:
// as long as the daemon runs, their packets are brought in. It returns what undoes it.
func (l *loaded) divert(was *loaded) (undo func() error, err error) {
	nothing := func() error { return nil }
	r := l.diversion()
	before := divert.Rules{Mark: r.Mark}
	if was != nil {
		before = was.diversion()
	}
	if l.config.Transparent.Rules == config.RulesManual || r.Empty() && before.Empty() {
		return nothing, nil
	}
	there, err := divert.Installed(before.Mark)
	if err == nil {
		r.IPv4, r.IPv6 = r.IPv4 || before.IPv4, r.IPv6 || before.IPv6
		err = r.Install()
	}
	undo = func() error {
		if !before.Empty() {
			err := before.Install()
			if before.Mark != r.Mark {
				err = errors.Join(err, divert.Remove(r.Mark))
			}
			return err
		}
		if there { // of an earlier daemon
			return nil
		}
		return divert.Remove(r.Mark)
	}
	if err == nil && before.Mark != r.Mark {
		err = divert.Remove(before.Mark)
	}
	if err != nil {
		err = errors.Join(fmt.Errorf("[transparent] rules = \"install\": %w", err), undo())
		return nothing, explainLack(err)
	}
	return undo, nil
}

// leftovers warns of rules that an earlier daemon has left, and that this one has no use
// for: they may keep traffic from a server.
func (l *loaded) leftovers() string {
	mark := uint32(l.config.Transparent.Mark)
	if there, err := divert.Installed(mark); !there || err != nil || !l.diversion().Empty() {
		return ""
	}
	return fmt.Sprintf("no listener is transparent, but rules with mark %d are in force: \"shaperd rules --remove --mark %d\" takes them away", mark, mark)
}

// explainLack says what to do about an error for want of privileges.
func explainLack(err error) error {
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	return fmt.Errorf("%w: run shaperd as root, or copy /usr/share/doc/shaperd/examples/network-admin.conf "+
		"to /etc/systemd/system/shaperd.service.d/ and run \"systemctl daemon-reload\"", err)
}

func rulesCommand(e env) *cobra.Command {
	var file string
	var install, remove bool
	var mark uint32
	cmd := &cobra.Command{
		Use:   "rules",
		Short: "Print, install or remove the rules of transparent listeners",
		Long: `Print the nft and ip commands that bring packets to the transparent listeners of a
configuration, and, behind "#", those that take the rules away. With --install or
--remove it is done. A daemon installs them itself unless [transparent] rules is
"manual". They stay when it stops, so that nothing gets around it meanwhile.`,
		Example: `  shaperd rules --config shaperd.toml
  shaperd rules --remove`,
		Args: noArgs("; the configuration is named by --config"),
		RunE: func(*cobra.Command, []string) error {
			if install && remove {
				return usageError{errors.New("--install and --remove: one of them")}
			}
			if mark != 0 {
				if !remove {
					return usageError{errors.New("--mark is for --remove")}
				}
				return removeRules(e, mark)
			}
			l, err := load(file)
			if err != nil {
				return err
			}
			r := l.diversion()
			switch {
			case remove:
				return removeRules(e, r.Mark)
			case r.Empty():
				return fmt.Errorf("%s: no listener is transparent: there are no rules", file)
			case install:
				return explainLack(r.Install())
			}
			_, err = fmt.Fprint(e.stdout, r.Commands(), commented(r.RemovalCommands()))
			return err
		},
	}
	cmd.Flags().StringVar(&file, "config", "/etc/shaperd/shaperd.toml", "configuration `file`")
	cmd.Flags().Uint32Var(&mark, "mark", 0, "the rules of which mark to remove, whatever the configuration says")
	cmd.Flags().BoolVar(&install, "install", false, "put the rules in force, in place of earlier ones")
	cmd.Flags().BoolVar(&remove, "remove", false, "take away what was installed")
	return cmd
}

func removeRules(e env, mark uint32) error {
	there, err := divert.Installed(mark)
	if err == nil {
		err = divert.Remove(mark)
	}
	if err == nil && !there {
		fmt.Fprintf(e.stdout, "there are no rules with mark %d\n", mark)
	}
	return explainLack(err)
}

// commented is the lines of a script behind "# ".
func commented(script string) string {
	out := ""
	for line := range strings.Lines(script) {
		out += "# " + line
	}
	return out
}
