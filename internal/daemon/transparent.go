package daemon

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/tproxy"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/shaper/config"
)

// installRules installs the rules that l needs, unless rules = "manual". was is the current
// configuration, or nil. The rules of a family stay installed while the daemon runs: listeners
// that are no longer transparent may have open connections. undo restores the earlier rules.
func installRules(l, was *plan.Plan) (undo func() error, err error) {
	nothing := func() error { return nil }
	r := l.TransparentRules()
	before := tproxy.Rules{Mark: r.Mark}
	if was != nil {
		before = was.TransparentRules()
	}
	if l.Config.Transparent.Rules == config.RulesManual || r.Empty() && before.Empty() {
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
		return nothing, PermissionHint(err)
	}
	return undo, nil
}

// leftoverRules returns a warning about rules that an earlier daemon left and this one does not
// need, or "". They may keep traffic from a server.
func leftoverRules(l *plan.Plan) string {
	mark := uint32(l.Config.Transparent.Mark)
	if there, err := tproxy.Installed(mark); !there || err != nil || !l.TransparentRules().Empty() {
		return ""
	}
	return fmt.Sprintf("no listener is transparent, but rules with mark %d are installed: \"shaperd rules --remove --mark %d\" removes them", mark, mark)
}

// PermissionHint adds to a permission error how to get the privileges.
func PermissionHint(err error) error {
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	return fmt.Errorf("%w: run shaperd as root, or copy /usr/share/doc/shaperd/examples/network-admin.conf "+
		"to /etc/systemd/system/shaperd.service.d/ and run \"systemctl daemon-reload\"", err)
}
