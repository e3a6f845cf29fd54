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
		Short: "Switch all limits off (kill switch), or on again",
		Long: `The kill switch. With "on" all limits only observe: they count and enforce nothing,
until "off" or for the time of --for. Blocks stay enforced. Status, top, metrics and the
log show a bypass. It survives reloads, and restarts when "run" has --state.`,
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
	addForFlag(cmd, &forTime, `until "shaperd bypass off"`)
	return cmd
}
