package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"shaperd.dev/shaperd/internal/quotafile"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// quotasPath returns the path of the file of quotas.
func (o *Options) quotasPath() string { return o.State + ".quotas" }

// openQuotas opens the file of quotas if a limit of policy has one, and it is not open yet.
func (s *server) openQuotas(ctx context.Context, policy *shaper.Policy) error {
	if policy.Quotas() == 0 || s.quotas != nil {
		return nil
	}
	if s.options.State == "" {
		for i := range policy.Quotas().All {
			return fmt.Errorf("limit %q: quota: needs --state, the file of which says where what was used is kept", policy.Limit(i).Name)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	type opened struct {
		*quotafile.File
		records map[string]*quota.Record
	}
	f, err := runAsync(ctx, func() (opened, error) {
		f, records, err := quotafile.Open(s.options.quotasPath(), time.Now())
		if err == nil && ctx.Err() != nil { // nobody waits any more, and the lock would keep the next attempt out
			return opened{}, errors.Join(ctx.Err(), f.Close())
		}
		return opened{f, records}, err
	})
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("open quotas in %s: no answer within %v", s.options.quotasPath(), loadTimeout)
	}
	if err != nil {
		return err
	}
	s.quotas = f.File
	s.proxy.UseQuotas(f.File, f.records)
	return nil
}

// closeQuotas closes the file of quotas, after the proxy.
func (s *server) closeQuotas() {
	if s.quotas == nil {
		return
	}
	if err := s.quotas.Close(); err != nil {
		s.log.Error("closing quotas failed", "err", err)
	}
}
