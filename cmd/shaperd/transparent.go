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
			r.IPv4 = r.IPv4 || a.Addr.Is4()
			r.IPv6 = r.IPv6 || a.Addr.Is6()
			if !a.Addr.IsUnspecified() {
				r.Addresses = append(r.Addresses, divert.Address(a))
			}
		}
	}
	return r
}

// ourDiversion is diversion where the daemon sees to it, and else nothing.
func (l *loaded) ourDiversion() divert.Rules {
	if l.config.Transparent.Rules == config.RulesManual {
		return divert.Rules{}
	}
	return l.diversion()
}

// divert puts the rules of l in force, if the daemon sees to them, and removes those of
// was, which may be nil, that l has not.
func (l *loaded) divert(was *loaded) error {
	r := l.ourDiversion()
	var err error
	if !r.Empty() {
		err = r.Install()
	}
	if was != nil && err == nil {
		if old := was.ourDiversion(); !old.Empty() && (r.Empty() || old.Mark != r.Mark) {
			err = divert.Remove(old.Mark)
		}
	}
	if err != nil {
		return explainLack(fmt.Errorf("[transparent] rules = \"install\": %w", err))
	}
	return nil
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
	cmd := &cobra.Command{
		Use:   "rules",
		Short: "Print, install or remove the rules of transparent listeners",
		Long: `Print the nft and ip commands that bring packets to the transparent listeners of a
configuration, and, behind "#", those that take the rules away. With --install or
--remove it is done. A daemon installs them itself unless [transparent] rules is
"manual". They stay when it stops, so that nothing gets around it meanwhile.`,
		Args: noArgs("; the configuration is named by --config"),
		RunE: func(*cobra.Command, []string) error {
			if install && remove {
				return usageError{errors.New("--install and --remove: one of them")}
			}
			l, err := load(file)
			if err != nil {
				return err
			}
			r := l.diversion()
			if remove {
				return divert.Remove(r.Mark)
			}
			switch {
			case r.Empty():
				return fmt.Errorf("%s: no listener is transparent: there are no rules", file)
			case install:
				return r.Install()
			}
			_, err = fmt.Fprint(e.stdout, r.Commands(), commented(r.RemovalCommands()))
			return err
		},
	}
	cmd.Flags().StringVar(&file, "config", "/etc/shaperd/shaperd.toml", "configuration `file`")
	cmd.Flags().BoolVar(&install, "install", false, "put the rules in force, in place of earlier ones")
	cmd.Flags().BoolVar(&remove, "remove", false, "take away what was installed")
	return cmd
}

// commented is the lines of a script behind "# ".
func commented(script string) string {
	out := ""
	for line := range strings.Lines(script) {
		out += "# " + line
	}
	return out
}
