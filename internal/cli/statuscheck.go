package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"shaperd.dev/shaperd/api"
)

// severity is a state of a service in Nagios and Icinga: the exit code of a plugin.
type severity int

const (
	stateOK severity = iota
	stateWarning
	stateCritical
	stateUnknown
)

func (s severity) String() string { return [...]string{"OK", "WARNING", "CRITICAL", "UNKNOWN"}[s] }

// pluginResult is what a monitoring plugin reports.
type pluginResult struct {
	problems [stateUnknown + 1][]string
	data     string // performance data
}

func (r *pluginResult) add(s severity, problem string) {
	r.problems[s] = append(r.problems[s], problem)
}

// state returns the severity of the worst problem, and all problems from the worst on.
func (r *pluginResult) state() (worst severity, all []string) {
	for s := stateUnknown; s > stateOK; s-- {
		if len(r.problems[s]) > 0 {
			worst, all = max(worst, s), append(all, r.problems[s]...)
		}
	}
	return worst, all
}

// checkStatus asks the daemon for its state. The severities are those of configs/alerts.yml.
func checkStatus(ctx context.Context, c *api.Client) (r pluginResult) {
	h, err := c.Health(ctx)
	if err != nil {
		return checkFailure(err)
	}
	switch h.State {
	case api.Silent: // other requests would wait
		r.add(stateCritical, h.String())
		return r
	case api.Starting:
		r.add(stateWarning, h.String())
		return r
	}
	s, err := c.Status(ctx)
	if err != nil {
		return checkFailure(err)
	}
	if h.State == api.NotAttached {
		r.add(stateCritical, h.String())
	}
	r.addCritical(s)
	r.addWarnings(s)
	limits, err := c.Limits(ctx)
	if err != nil {
		return checkFailure(err)
	}
	for _, l := range limits {
		if l.Shed == nil {
			continue
		}
		for _, signal := range l.Shed.Signals {
			if signal.Error != "" {
				r.add(stateWarning, fmt.Sprintf("limit %q cannot read %s", l.Name, signalName(signal)))
			}
		}
	}
	r.data = performanceData(s)
	return r
}

// checkFailure returns the result when the daemon did not say how it is: only without permission is
// that unknown.
func checkFailure(err error) (r pluginResult) {
	var said *api.APIError
	if errors.Is(err, api.ErrNoDaemon) || errors.As(err, &said) && said.Code == http.StatusServiceUnavailable {
		r.add(stateCritical, err.Error())
	} else {
		r.add(stateUnknown, err.Error())
	}
	return r
}

func (r *pluginResult) addCritical(s api.Status) {
	for _, l := range s.Listeners {
		if l.Unavailable != "" {
			r.add(stateCritical, fmt.Sprintf("no downstream is up at %s: %s", l.Name, l.Unavailable))
		}
	}
	if s.Conformance != "conformant" {
		r.add(stateCritical, "conformance was violated in the last minute")
	}
	if s.QuotaError != "" {
		r.add(stateCritical, "quotas wait: "+s.QuotaError)
	}
	if s.Shared != nil {
		for _, problem := range s.Shared.Problems {
			state := stateWarning
			if problem.Severity == "critical" {
				state = stateCritical
			}
			r.add(state, strings.ToLower(problem.Title))
		}
	}
}

func (r *pluginResult) addWarnings(s api.Status) {
	warn := func(when bool, text string) {
		if when {
			r.add(stateWarning, text)
		}
	}
	warn(s.State == "stopping", api.Stopping)
	warn(s.Bypass != nil, "bypass is on")
	warn(!s.Reload.OK, "the last reload failed")
	if s.RolledBack != nil {
		r.add(stateWarning, "rolled back to revision "+s.RolledBack.Revision)
	}
	for _, l := range s.Listeners {
		warn(l.Hold != nil && l.Hold.State != "ramp", fmt.Sprintf("new connections are held at %s, %d wait", l.Name, l.Waiting))
	}
	warn(len(s.SourceErrors) > 0, "old sources are in use: "+strings.Join(s.SourceErrors, ", "))
	warn(s.ScheduleError != "", "old values are in use: "+s.ScheduleError)
	warn(s.StateError != "", "overrides are not saved: "+s.StateError)
	warn(len(s.EndpointErrors) > 0, strings.Join(s.EndpointErrors, ", "))
}

// performanceData returns figures as Nagios plugins print them: label=value[unit];warn;crit;min;max.
func performanceData(s api.Status) string {
	var connections, flows, waiting int64
	for _, l := range s.Listeners {
		connections, flows, waiting = connections+l.Connections, flows+l.Flows, waiting+int64(l.Waiting)
	}
	return fmt.Sprintf("connections=%d;;;0 flows=%d;;;0 waiting=%d;;;0 descriptors=%d;;;0;%d memory=%dB;;;0 cpu=%.3f;;;0",
		connections, flows, waiting, s.Process.Descriptors, s.Process.MaxDescriptors, s.Process.Memory, s.Process.CPUCores)
}

// printCheck prints r on one line. A | begins the performance data, so no text has one.
func (e env) printCheck(r pluginResult) error {
	state, problems := r.state()
	text := cmp.Or(api.Printable(strings.Join(problems, "; ")), "limits are enforced")
	line := fmt.Sprintf("SHAPERD %s - %s", state, strings.ReplaceAll(text, "|", "/"))
	if r.data != "" {
		line += " | " + r.data
	}
	if _, err := fmt.Fprintln(e.stdout, line); err != nil {
		return err
	}
	if state == stateOK {
		return nil
	}
	return exitError(state)
}

// printReady prints whether the daemon can take traffic.
func (e env) printReady(ctx context.Context, c *api.Client) error {
	h, err := c.Health(ctx)
	text := h.String()
	if err != nil {
		h.State, text = "", err.Error()
	}
	if _, err := fmt.Fprintln(e.stdout, api.Printable(text)); err != nil {
		return err
	}
	if h.State != api.Ready {
		return exitError(exitFailure)
	}
	return nil
}
