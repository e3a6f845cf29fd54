package daemon

import (
	"context"

	sd "github.com/coreos/go-systemd/v22/daemon"
)

// alive reports whether both loops answer before ctx ends: that of the proxy, and that of
// serve, which runs commands.
func (s *server) alive(ctx context.Context) bool {
	select {
	case s.commands <- func(context.Context) {}:
	case <-s.done: // the drain has its own timeout
	case <-ctx.Done():
		return false
	}
	return s.proxy.Alive(ctx)
}

// notify sends state to the service manager, if there is one.
func notify(state string) { _, _ = sd.SdNotify(false, state) }
