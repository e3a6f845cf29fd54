package cli

import (
	"errors"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

func bypassCommand(e env) *cobra.Command {
	var forTime durationFlag
	cmd := &cobra.Command{
		Use:   "bypass on|off",
		Short: "Suspend all limits (kill switch), or enforce them again",
		Long: `Suspend all limits, or enforce them again. With "on", all limits only observe: they count,
and enforce nothing. The bypass ends with "off", or after --for. Blocks stay enforced.
"status", "top", metrics and the log show the bypass. It survives reloads, and also
restarts if "run" has --state.`,
		Example: `  shaperd bypass on --for 10m
  shaperd bypass off`,
		Annotations: changeAnnotations,
		Args:        wantArgs("on|off"),
		ValidArgs:   []string{"on", "off"},
		RunE: func(cmd *cobra.Command, args []string) error {
			on := args[0] == "on"
			switch {
			case !on && args[0] != "off":
				return usageError{errors.New("bypass takes on or off")}
			case !on && forTime != 0:
				return usageError{errors.New("--for requires bypass on")}
			}
			c := e.client()
			was, err := c.Status(cmd.Context())
			if err != nil {
				return err
			}
			s, err := c.Bypass(cmd.Context(), api.SetBypass{On: on, Duration: forTime.seconds()})
			if err != nil {
				return err
			}
			return e.show(s, func(p *term.Printer) {
				switch {
				case s.Bypass != nil:
					p.Line("%s", p.Red(bypassText(s)))
				case was.Bypass == nil:
					p.Line("Bypass was already off.")
				default:
					p.Line("Bypass is off: limits are enforced again.")
				}
			})
		},
	}
	addForFlag(cmd, &forTime, "bypass", `until "shaperd bypass off"`)
	return cmd
}
