package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/tproxy"
	"shaperd.dev/shaperd/shaper/config"
)

// tproxyRules returns the rules that the transparent listeners of l need.
func (l *loadedConfig) tproxyRules() tproxy.Rules {
	r := tproxy.Rules{Mark: uint32(l.config.Transparent.Mark)}
	for _, listen := range l.config.Listen {
		if !listen.Transparent {
			continue
		}
		for _, a := range listen.Addresses {
			anyFamily := len(listen.AcceptProxyFrom) > 0 // a PROXY header can name a source of any family
			r.IPv4 = r.IPv4 || anyFamily || a.Addr.Is4()
			r.IPv6 = r.IPv6 || anyFamily || a.Addr.Is6()
			if !a.Addr.IsUnspecified() {
				r.Addresses = append(r.Addresses, tproxy.Address(a))
			}
		}
	}
	return r
}

// installRules installs the rules that l needs, unless rules = "manual". was is the current
// configuration, or nil. The rules of a family stay installed while the daemon runs: listeners
// that are no longer transparent may have open connections. undo restores the earlier rules.
func (l *loadedConfig) installRules(was *loadedConfig) (undo func() error, err error) {
	nothing := func() error { return nil }
	r := l.tproxyRules()
	before := tproxy.Rules{Mark: r.Mark}
	if was != nil {
		before = was.tproxyRules()
	}
	if l.config.Transparent.Rules == config.RulesManual || r.Empty() && before.Empty() {
		return nothing, nil
	}
	there, err := tproxy.Installed(before.Mark)
	if err == nil {
		r.IPv4, r.IPv6 = r.IPv4 || before.IPv4, r.IPv6 || before.IPv6
		err = r.Install()
	}
	undo = func() error {
		if !before.Empty() {
			err := before.Install()
			if before.Mark != r.Mark {
				err = errors.Join(err, tproxy.Remove(r.Mark))
			}
			return err
		}
		if there { // installed by an earlier daemon
			return nil
		}
		return tproxy.Remove(r.Mark)
	}
	if err == nil && before.Mark != r.Mark {
		err = tproxy.Remove(before.Mark)
	}
	if err != nil {
		err = errors.Join(fmt.Errorf("[transparent] rules = \"install\": %w", err), undo())
		return nothing, permissionHint(err)
	}
	return undo, nil
}

// leftoverRules returns a warning about rules that an earlier daemon left and this one does not
// need, or "". They may keep traffic from a server.
func (l *loadedConfig) leftoverRules() string {
	mark := uint32(l.config.Transparent.Mark)
	if there, err := tproxy.Installed(mark); !there || err != nil || !l.tproxyRules().Empty() {
		return ""
	}
	return fmt.Sprintf("no listener is transparent, but rules with mark %d are installed: \"shaperd rules --remove --mark %d\" removes them", mark, mark)
}

// permissionHint adds to a permission error how to get the privileges.
func permissionHint(err error) error {
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
		Long: `Print the nft and ip commands that redirect packets to the transparent listeners of a
configuration, and, commented out, those that remove the rules. With --install or
--remove, do it. The daemon installs the rules itself unless [transparent] rules is
"manual". They stay when it stops, so that no traffic bypasses it in the meantime.`,
		Example: `  shaperd rules --config shaperd.toml
  shaperd rules --remove`,
		Args: noArgs("; use --config to name the configuration"),
		RunE: func(*cobra.Command, []string) error {
			if install && remove {
				return usageError{errors.New("--install and --remove cannot be combined")}
			}
			if mark != 0 {
				if !remove {
					return usageError{errors.New("--mark requires --remove")}
				}
				return removeRules(e, mark)
			}
			l, err := load(file)
			if err != nil {
				return err
			}
			r := l.tproxyRules()
			switch {
			case remove:
				return removeRules(e, r.Mark)
			case r.Empty():
				return fmt.Errorf("%s: no listener is transparent, so there are no rules", file)
			case install:
				return permissionHint(r.Install())
			}
			_, err = fmt.Fprint(e.stdout, r.Commands(), commentOut(r.RemovalCommands()))
			return err
		},
	}
	cmd.Flags().StringVar(&file, "config", "/etc/shaperd/shaperd.toml", "configuration `file`")
	cmd.Flags().Uint32Var(&mark, "mark", 0, "with --remove: remove the rules with this mark")
	cmd.Flags().BoolVar(&install, "install", false, "install the rules, replacing earlier ones")
	cmd.Flags().BoolVar(&remove, "remove", false, "remove the installed rules")
	return cmd
}

func removeRules(e env, mark uint32) error {
	there, err := tproxy.Installed(mark)
	if err == nil {
		err = tproxy.Remove(mark)
	}
	if err == nil && !there {
		fmt.Fprintf(e.stdout, "there are no rules with mark %d\n", mark)
	}
	return permissionHint(err)
}

// commentOut comments out the lines of a script.
func commentOut(script string) string {
	out := ""
	for line := range strings.Lines(script) {
		out += "# " + line
	}
	return out
}
